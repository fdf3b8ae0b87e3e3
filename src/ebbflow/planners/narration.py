"""What a long call says of itself where nobody asked it to tell: nothing for two seconds, then that it goes on.

1. On a terminal: one line with a moving bar on standard error, which changes while the call goes on and is gone with
   it.
2. Elsewhere: one line through ``logging``, as a warning of the logger ``ebbflow``, which is shown where nobody has set
   logging up.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from ebbflow.planners.base import Progress

__all__ = ["Narrator", "aloud", "narrated"]

AFTER_SECONDS = 2.0
TICK_SECONDS = 0.25
_BAR = 12
_CLEAR = "\r\x1b[K"

_logger = logging.getLogger("ebbflow")


class Narrator:
    """Remembers what it was told last; :func:`narrated` says it."""

    def __init__(self) -> None:
        self.last = Progress("working")

    def __call__(self, progress: Progress) -> None:
        """Take note of ``progress``."""
        self.last = progress


aloud = Narrator()
"""What ``progress`` is by default."""


@contextmanager
def narrated(progress: Callable[[Progress], None]) -> Generator[None]:
    """While open, what a :class:`Narrator` is told is said, once two seconds have passed; others tell by themselves."""
    if not isinstance(progress, Narrator):
        yield
        return
    over = threading.Event()
    teller = threading.Thread(target=_tell, args=(progress, over), name="ebbflow-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def _tell(narrator: Narrator, over: threading.Event) -> None:
    begin = time.monotonic()
    if over.wait(AFTER_SECONDS):
        return
    if not _on_terminal():
        _logger.warning(
            "%s: this takes a while, once for each shape of inputs (progress=print tells more, progress=None nothing)",
            narrator.last,
        )
        return
    try:
        while not over.wait(TICK_SECONDS):
            sys.stderr.write(_CLEAR + _line(narrator.last, time.monotonic() - begin))
            sys.stderr.flush()
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()
    except (OSError, ValueError):  # the terminal is gone
        return


def _on_terminal() -> bool:
    try:
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # there is no standard error, or it is closed
        return False


def _line(progress: Progress, seconds: float) -> str:
    place = round(seconds / TICK_SECONDS) % (2 * _BAR - 2)
    place = min(place, 2 * _BAR - 2 - place)
    bar = "." * place + "=" + "." * (_BAR - 1 - place)
    text = f"ebbflow [{bar}] {seconds:.0f} s  {progress}"
    return text[: shutil.get_terminal_size().columns - 1]
