"""What a long call says of itself where nobody asked it to tell: nothing for two seconds, then that it goes on.

And what it was at when Ctrl-C ended it, which a note of the ``KeyboardInterrupt`` says.

1. On a terminal: one line with a moving bar on standard error, which changes while the call goes on and is gone with
   it.
2. Elsewhere: a line through ``logging`` and another every minute, as warnings of the logger ``ebbtide``, which are
   shown where nobody has set logging up.
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

from ebbtide.planners.base import Progress

__all__ = ["INTERRUPTED", "Narrator", "aloud", "interrupted_at", "interruption_noted", "narrated"]

INTERRUPTED = "ebbtide was interrupted at this: "

AFTER_SECONDS = 2.0
TICK_SECONDS = 0.25
MINUTE = 60.0
_BAR = 12
_CLEAR = "\r\x1b[K"

_logger = logging.getLogger("ebbtide")


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
def interruption_noted(progress: Callable[[Progress], None]) -> Generator[Callable[[Progress], None]]:
    """While open, a ``KeyboardInterrupt`` gets a note of what was told last; gives what is to be told.

    Args:
        progress: told everything too.
    """
    last: Progress | None = None

    def tell(each: Progress) -> None:
        nonlocal last
        last = each
        progress(each)

    try:
        yield tell
    except KeyboardInterrupt as error:
        if last is not None:
            interrupted_at(error, last)
        raise


def interrupted_at(error: BaseException, progress: Progress) -> None:
    """Note in ``error`` what it interrupted; of several notes each is of what is around the one before it."""
    note = f"{INTERRUPTED}{progress}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


@contextmanager
def narrated(progress: Callable[[Progress], None], why: str = "this takes a while") -> Generator[None]:
    """While open, what a :class:`Narrator` is told is said, once two seconds have passed; others tell by themselves.

    Args:
        progress: who is told.
        why: it takes so long.
    """
    if not isinstance(progress, Narrator):
        yield
        return
    over = threading.Event()
    teller = threading.Thread(target=_tell, args=(progress, why, over), name="ebbtide-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def _tell(narrator: Narrator, why: str, over: threading.Event) -> None:
    begin = time.monotonic()
    if over.wait(AFTER_SECONDS):
        return
    if not _on_terminal():
        _logger.warning("%s (%s; progress=print tells more, progress=None nothing)", why, narrator.last)
        while not over.wait(MINUTE):
            _logger.warning("%s (%.0f s)", narrator.last, time.monotonic() - begin)
        return
    try:
        while not over.wait(TICK_SECONDS):
            sys.stderr.write(_CLEAR + _line(_with(narrator.last, why), time.monotonic() - begin))
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


def _with(progress: Progress, why: str) -> str:
    """What goes on, and why it takes so long unless that is in it; a narrow terminal shows what changes."""
    text = str(progress)
    return text if why in text else f"{text}; {why}"


def _line(doing: str, seconds: float) -> str:
    place = round(seconds / TICK_SECONDS) % (2 * _BAR - 2)
    place = min(place, 2 * _BAR - 2 - place)
    bar = "." * place + "=" + "." * (_BAR - 1 - place)
    text = f"ebbtide [{bar}] {seconds:.0f} s  {doing}"
    return text[: shutil.get_terminal_size().columns - 1]
