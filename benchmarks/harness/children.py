"""Each case in a process of its own: one that fails, or dies for memory, costs only its own rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from harness.record import Row

__all__ = ["ROOT", "ROW", "emit", "run_child", "short_error"]

ROOT = Path(__file__).resolve().parents[2]
ROW = "ROW "
"""Begins a line that is a row."""


def emit(rows: Iterable[Row]) -> None:
    """In a child: hand rows to the parent as they come."""
    for row in rows:
        print(ROW + json.dumps(row.to_json()), flush=True)


def run_child(
    arguments: Sequence[str], on_row: Callable[[Row], None], environment: Mapping[str, str], limit_seconds: float
) -> str | None:
    """Run this interpreter with ``arguments``; rows are handed on as they are printed.

    Returns:
        ``None`` if it ended well, else what went wrong in one line.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    late = threading.Event()
    timer = threading.Timer(limit_seconds, lambda: (late.set(), process.kill()))
    timer.start()
    errors: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    drain = threading.Thread(target=errors.extend, args=(process.stderr,))
    drain.start()
    try:
        for line in process.stdout:
            if line.startswith(ROW):
                on_row(Row.from_json(json.loads(line.removeprefix(ROW))))
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
        drain.join()
    if code == 0:
        return None
    if late.is_set():
        return f"ended after {limit_seconds:g} s, the most that one case may take"
    return f"exit {code}: {short_error(errors)}"


def short_error(lines: Iterable[str]) -> str:
    """The line of a traceback that says what happened, without the paths of this machine."""
    kept = [line.strip() for line in lines if line.strip()]
    named = [line for line in kept if "Error" in line.split(":")[0] or "Exceeded" in line.split(":")[0]]
    last = (named or kept or ["nothing on standard error"])[-1]
    return last.replace(str(ROOT) + os.sep, "").replace(str(Path.home()), "~")[:400]
