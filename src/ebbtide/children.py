"""Processes of Python that Ebbtide starts beside training: they run a module of its own, never the user's script.

A child ends with the process that started it, at the latest a second later and however that ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

__all__ = ["end_with_starter", "start_child"]

_WATCH_SECONDS = 0.5


def start_child(
    module: str, *arguments: object, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Run ``module`` as a script in a process of its own, with this one's number before its ``arguments``.

    An interrupt from the terminal does not reach it: it is for training, which may well go on.

    Raises:
        OSError, ValueError: if no process can be started.
    """
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(os.getpid()), *map(str, arguments)],
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=subprocess.DEVNULL if stdout is None else stdout,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
        process_group=0,
    )


def end_with_starter() -> list[str]:
    """In a child: have it end with who started it; its arguments."""
    starter, *arguments = sys.argv[1:]
    threading.Thread(target=_watch, args=(int(starter),), daemon=True).start()
    return arguments


def _watch(starter: int) -> None:
    while os.getppid() == starter:  # else somebody else is its parent now
        time.sleep(_WATCH_SECONDS)
    os._exit(0)
