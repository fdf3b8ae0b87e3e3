"""Signals that wait: what a signal's handler raises must not come up in the middle of torch's tracing.

Python runs a signal's handler between any two instructions of the main thread, and what it raises (Ctrl-C's
``KeyboardInterrupt``, a timeout's or a dead worker's error) comes up right there. Where torch's C++ calls Python while
a step is traced, that ends the process (``terminate called``, out of a constructor that expects no error), is swallowed
by a callback, or leaves what torch had set for the while.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

__all__ = ["signals_wait"]

_AGAIN = (
    b"ebbflow: a step is being captured, which cannot be interrupted safely; stopping when it is captured "
    b"(interrupt again to stop at once)\n"
)


class _Waiting:
    """A handler that keeps one signal for later; a second one of its kind does not wait."""

    def __init__(self, theirs: Callable[[int, FrameType | None], Any]) -> None:
        self.theirs = theirs
        self.over = False
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.over or self.came:
            self.theirs(number, frame)
            return
        self.came = True
        if number == signal.SIGINT:
            with suppress(OSError):  # not print, which an interrupted print would refuse
                os.write(2, _AGAIN)


@contextmanager
def signals_wait() -> Generator[None]:
    """While open, a signal that Python handles waits for the end, where its handler is run and may raise.

    A second signal of a kind does not wait. Off the main thread nothing is to be done: handlers run on that alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    laid: dict[int, _Waiting] = {}
    try:
        for number in signal.valid_signals():
            if callable(theirs := signal.getsignal(number)):
                laid[number] = _Waiting(theirs)
                with suppress(ValueError):  # an interpreter beside the main one may not
                    signal.signal(number, laid[number])
        yield
    finally:
        # Where a handler raises meanwhile, what stays laid hands its signals on.
        for each in laid.values():
            each.over = True
        for number, each in laid.items():
            if signal.getsignal(number) is each:
                signal.signal(number, each.theirs)
        for number, each in laid.items():
            if each.came:
                each.theirs(number, inspect.currentframe())
