"""Signals that wait: a signal's handler must not run in the middle of torch's tracing, nor while it looks at guards.

Python runs a signal's handler between any two instructions of the main thread, and what it raises (Ctrl-C's
``KeyboardInterrupt``, a timeout's or a dead worker's error) comes up right there. Where torch's C++ calls Python while
a step is traced, that ends the process (``terminate called``, out of a constructor that expects no error), is swallowed
by a callback, or leaves what torch had set for the while. Where it looks at guards, whatever comes up is swallowed, and
no read of a tensor that is offloaded is refused (``torch_seams.offloaded``).
"""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

__all__ = ["raised_by_a_handler", "signals_wait"]

_TRACING = "torch is tracing a step, which cannot be interrupted safely; Ctrl-C is handled when that is done"
_AGAIN = "(press it again to have it handled at once)"
_ASK_TO_END = {getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")}
_ACTION_BYTES = 1024  # more than a struct sigaction has anywhere
_NUMBERS = tuple(sorted(map(int, signal.valid_signals())))
_handler_of: Callable[[int], Any] = getattr(signal, "_signal", signal).getsignal  # makes no enumerations
_sigaction: Any = getattr(ctypes.CDLL(None), "sigaction", None) if os.name == "posix" else None


class _Block:
    """One ``with signals_wait()``."""

    def __init__(self, why: str) -> None:
        self.message = f"ebbtide: {why} {_AGAIN}\n".encode() if why else b""
        self.over = False
        self.process = os.getpid()


class _Waiting:
    """A handler that keeps one signal for later, in the process of its block."""

    def __init__(self, block: _Block, theirs: Callable[[int, FrameType | None], Any]) -> None:
        self.block = block
        self.theirs = theirs
        self.came = False

    @property
    def waits(self) -> bool:
        return not self.block.over and self.block.process == os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.waits or (self.came and number in _ASK_TO_END):
            self.theirs(number, frame)
            return
        self.came = True
        if number == signal.SIGINT and self.block.message:
            with suppress(OSError):  # not print, which an interrupted print would refuse
                os.write(2, self.block.message)


@contextmanager
def signals_wait(why: str = _TRACING) -> Generator[None]:
    """While open, a signal that Python handles waits for the end, where its handler is run and may raise.

    ``why`` is written to standard error when Ctrl-C comes; empty, for what is over before anybody wonders, nothing is.

    A second one that asks the process to end (Ctrl-C's, SIGTERM) does not wait. A block inside of another has nothing
    to do, and neither has one off the main thread: handlers run on that alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    block = _Block(why)
    laid: dict[int, _Waiting] = {}
    try:
        for number in _NUMBERS:
            theirs = _handler_of(number)
            if callable(theirs) and not (isinstance(theirs, _Waiting) and theirs.waits):
                laid[number] = _Waiting(block, theirs)
                with suppress(ValueError):  # an interpreter beside the main one may not
                    _lay(number, laid[number])
        yield
    finally:
        block.over = True  # from here on, what is still laid hands its signals on
        try:
            _put_back(laid)
        finally:
            _run([(number, each) for number, each in laid.items() if each.came])


def raised_by_a_handler(error: BaseException) -> bool:
    """Whether ``error`` came out of the handler of a signal, which interrupted what else is in its traceback."""
    handlers: list[object] = [_handler_of(number) for number in _NUMBERS]
    functions = [getattr(each, "__func__", each) for each in handlers]
    functions += [vars(type(each)).get("__call__") for each in handlers]
    codes = {each.__code__ for each in functions if inspect.isfunction(each)}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _lay(number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
    """Make ``handler`` Python's; what the system does on a signal stays what it is.

    That may be another's than Python's (``faulthandler.register``, a library in C, which may call Python's in turn),
    and has flags of its own (``signal.siginterrupt``, asyncio's handlers).
    """
    if _sigaction is None:
        signal.signal(number, handler)
        return
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    known = not _sigaction(number, None, action)
    try:
        signal.signal(number, handler)
    finally:
        if known:
            _sigaction(number, action, None)


def _put_back(laid: dict[int, _Waiting]) -> None:
    try:
        for number, each in laid.items():
            if _handler_of(number) is each:
                _lay(number, each.theirs)
    except BaseException:  # of a handler that is theirs again
        _put_back(laid)
        raise


def _run(came: Sequence[tuple[int, _Waiting]]) -> None:
    """Their handlers, each also where one before it raises."""
    if came:
        (number, each), *others = came
        try:
            each.theirs(number, inspect.currentframe())
        finally:
            _run(others)
