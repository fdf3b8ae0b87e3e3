"""The door: seconds of ``import ebbtide`` beyond ``import torch``, of ``--help`` and of a mistyped option.

Every run is a fresh process; the kinds take turns, and a first round, which writes byte code, does not count.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.record import Row, at_most

__all__ = ["rows"]

TITLE = "Seconds at the door: medians of fresh processes in turns"
SOURCE = Path(__file__).resolve().parents[2] / "src"
MOST_IMPORT, MOST_HELP = 0.3, 0.5
ROUNDS = 9

_IMPORT = "import time, torch; begin = time.perf_counter(); import ebbtide; {}; print(time.perf_counter() - begin)"
_ALL = "[getattr(ebbtide, name) for name in ebbtide.__all__]"


def rows(rounds: int = ROUNDS) -> Iterator[Row]:
    kinds: dict[str, tuple[Callable[[], float], float | None]] = {
        "import ebbtide, after torch": (lambda: _imported(_IMPORT.format("None")), MOST_IMPORT),
        "import ebbtide and every public name, after torch": (lambda: _imported(_IMPORT.format(_ALL)), None),
        "ebbtide --help": (lambda: _command(["--help"], 0), MOST_HELP),
        "ebbtide plan --budgt 1GiB, a mistyped option": (lambda: _command(["plan", "--budgt", "1GiB"], 2), MOST_HELP),
        "ebbtide paln, a mistyped command": (lambda: _command(["paln"], 2), MOST_HELP),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 1):
        for kind, (run, _) in kinds.items():
            spent = run()
            if turn:
                seconds[kind].append(spent)
    for kind, (_, target) in kinds.items():
        median = statistics.median(seconds[kind])
        checks = () if target is None else (at_most("seconds", median, target),)
        yield Row("door", {"case": kind, "seconds": median, "best": min(seconds[kind]), "rounds": rounds}, checks)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(SOURCE)}


def _imported(program: str) -> float:
    done = subprocess.run([sys.executable, "-c", program], env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def _command(arguments: list[str], code: int) -> float:
    """Seconds of the whole process, the interpreter's start included."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "ebbtide.cli", *arguments]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
    spent = time.perf_counter() - begin
    assert done.returncode == code, f"exit code {done.returncode}, not {code}: {done.stdout}{done.stderr}"
    return spent
