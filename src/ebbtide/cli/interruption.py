"""Ctrl-C while planning: the first keeps the best plan so far, the second aborts."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from ebbtide.planners import Interrupt, Progress

__all__ = ["KeepBest"]


class _PlanningInterrupt(Interrupt):
    """An interrupt whose time limit counts from when planning begins: capture and profiling come before."""

    def __init__(self, time_limit_seconds: float | None) -> None:
        super().__init__(None)
        self._limit_seconds = time_limit_seconds

    def begin(self) -> None:
        """Planning begins; later calls change nothing."""
        if self._limit_seconds is not None and self._deadline is None:
            self._deadline = time.monotonic() + self._limit_seconds


class KeepBest:
    """Turns Ctrl-C into an :class:`~ebbtide.planners.Interrupt` as soon as there is something to keep.

    That is a plan, or a smallest budget for a refusal. Before the planner has found anything there is nothing to keep,
    and Ctrl-C aborts as it does everywhere.

    Args:
        progress: told everything that the planner tells.
        time_limit_seconds: of planning, after which it stops by itself; ``None`` is never.

    Attributes:
        interrupt: for the planner.
    """

    def __init__(self, progress: Callable[[Progress], None], time_limit_seconds: float | None = None) -> None:
        self.interrupt = _PlanningInterrupt(time_limit_seconds)
        self._progress = progress
        self._has_something = False
        self._previous: Any = None

    def tell(self, progress: Progress) -> None:
        """What the planner reports; passed on."""
        self.interrupt.begin()
        known = progress.best_overhead is not None or progress.smallest_bytes is not None
        self._has_something = self._has_something or known
        self._progress(progress)

    def __enter__(self) -> KeepBest:
        if threading.current_thread() is threading.main_thread():  # Python delivers signals to no other
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.interrupt.interrupted or not self._has_something:
            raise KeyboardInterrupt
        self.interrupt.set()
