"""Work on what a process shares, a piece at a time, where the garbage collector may bring a piece at any moment."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

__all__ = ["DeferredQueue"]

Result = TypeVar("Result")


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.pieces: deque[Callable[[], None]] = deque()


class DeferredQueue:
    """Pieces of work, one at a time, each in the thread that brings it.

    The garbage collector runs finalizers in whatever thread makes the next object, so maybe in the middle of work that
    a lock protects. There a plain lock would wait for itself, and a reentrant one would let the finalizer change what
    is being worked on. Here what a finalizer brings (:meth:`do`) is done when its thread has done what it was at.
    """

    def __init__(self) -> None:
        self._mine = threading.RLock()
        self._amid = threading.Lock()  # held while a piece is done; nobody waits for it who has not the other
        self._here = _OfThread()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """In a child: whoever was amid is not there."""
        self._mine, self._amid = threading.RLock(), threading.Lock()

    def now(self, work: Callable[[], Result]) -> Result:
        """What ``work`` returns or raises, at once. For what no finalizer calls."""
        self._sweep()  # what an interrupt has left
        try:
            with self._mine:
                if self._amid.locked():
                    return work()
                with self._amid:
                    return work()
        finally:
            self._sweep()

    def do(self, piece: Callable[[], None]) -> None:
        """Do ``piece`` before this returns, or, if this very thread is in the middle of another one, right after that.

        Args:
            piece: must not raise; where an interrupt ends it, it is begun again when this thread comes next, so that
                doing it twice has to be as good as once.
        """
        self._here.pieces.append(piece)
        self._sweep()

    def _sweep(self) -> None:
        pieces = self._here.pieces
        while pieces:
            with self._mine:
                if self._amid.locked():
                    return  # this thread is amid, and sweeps afterwards
                with self._amid:
                    while pieces:
                        pieces[0]()
                        pieces.popleft()
