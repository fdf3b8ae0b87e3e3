"""The CPU time of one model, and an end to whoever would take more of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["CPUClock", "OutOfTime"]


class OutOfTime(BaseException):
    """The model's CPU time is spent. No ``Exception``, so that compilers that try and go on do not swallow it."""


class CPUClock:
    """Counts from the process's start, as each model has a process of its own.

    Args:
        most_seconds: CPU seconds that the model may take.
    """

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds = most_seconds

    @property
    def spent(self) -> float:
        """CPU seconds so far."""
        return time.process_time()

    @property
    def left(self) -> float:
        """CPU seconds that are left."""
        return self._most_seconds - self.spent

    @contextmanager
    def interrupting(self, kept_seconds: float) -> Iterator[None]:
        """Raise :class:`OutOfTime` within the block once no more than ``kept_seconds`` are left."""
        left = self.left - kept_seconds
        if left <= 0:
            raise OutOfTime
        before = signal.signal(signal.SIGPROF, self._end)
        signal.setitimer(signal.ITIMER_PROF, left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    @staticmethod
    def _end(*_: Any) -> None:
        raise OutOfTime
