"""The planners' kernels, compiled by a process of their own while a new installation captures its first step.

Numba keeps what it has compiled on disk, so this is needed once. It takes some seconds, as long as a capture does.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import platformdirs

from ebbtide.children import end_with_starter, start_child

__all__ = ["begin_compiling", "wait_for_compiled"]

_HERE = Path(__file__).parent
_LAST = "annealing.anneal-*.nbi"  # numba's index of the kernel that is compiled last
_MOST_SECONDS = 60.0

_process: subprocess.Popen[bytes] | None = None


def begin_compiling() -> None:
    """Have the kernels compiled, unless they are or somebody is at it."""
    global _process
    if _process is not None or _is_compiled():
        return
    try:
        _process = start_child(__name__)
    except (OSError, ValueError):  # they are compiled here when they are needed
        return


def wait_for_compiled() -> None:
    """Wait for what was begun, if anything was: the same is not to be compiled twice."""
    global _process
    if _process is None:
        return
    try:
        _process.wait(_MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return
    _process = None


def _is_compiled() -> bool:
    """Whether numba has files of the kernels that are younger than all that goes into them."""
    sources = [path.stat().st_mtime for folder in ("chains", "search") for path in (_HERE.parent / folder).glob("*.py")]
    elsewhere = os.environ.get("NUMBA_CACHE_DIR") or platformdirs.user_cache_dir("numba", appauthor=False)
    found = [*(_HERE / "__pycache__").glob(_LAST), *Path(elsewhere).glob(f"search_*/{_LAST}")]
    return any(path.stat().st_mtime >= max(sources) for path in found)


def _forked() -> None:
    """In a child: the process is its parent's."""
    global _process
    _process = None


os.register_at_fork(after_in_child=_forked)


if __name__ == "__main__":
    from ebbtide.planners.registry import planner_named
    from ebbtide.planners.search.jit import compile_waiting

    end_with_starter()
    planner_named("auto")  # whose kernels wait to be compiled once it is imported
    compile_waiting()
