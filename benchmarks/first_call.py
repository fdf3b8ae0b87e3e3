"""What does it take until a model trains, and does a better plan come beside it? Against aot_eager and older code.

    python benchmarks/first_call.py [--quick] [--only NAME ...] [--old COMMIT] [--out FILE]

NAME is a question (starts, beside) or part of ``question:case``. With ``--old`` the starts of that commit are measured
besides, in turns with ours. Every case runs in processes of its own; results are written after each.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.suite import main
from questions import beside, starts

SEEDS = {"weights and inputs": 0, "planners": 0}
QUESTIONS = {"starts": starts, "beside": beside}
MOST_SECONDS = 3_000.0
"""For one case; a child that takes longer is ended and reported."""
ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def _older() -> Iterator[None]:
    """While open, the commit that ``--old`` names is checked out, for the children of ``starts``."""
    if "--old" not in sys.argv:
        yield
        return
    at = sys.argv.index("--old")
    commit = sys.argv[at + 1]
    del sys.argv[at : at + 2]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "old"
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), commit], cwd=ROOT, check=True)
        os.environ[starts.OLD] = f"{commit}:{tree}"
        try:
            yield
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


if __name__ == "__main__":
    with _older():
        code = main(__file__, str(__doc__), QUESTIONS, MOST_SECONDS)
    sys.exit(code)
