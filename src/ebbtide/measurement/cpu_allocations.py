"""The CPU allocator's events, as PyTorch's own profiler reports them: the only true count of bytes on CPU.

The profiler sees every block that torch's CPU allocator hands out or takes back on this thread while it runs;
it costs time and no allocator bytes. A release counts only if its block was handed out in the same window: for
older blocks the profiler reports nothing, or the size of whatever block lay at that address in an earlier
window (its table of sizes outlives a window), so levels are relative to the window's start.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from ebbtide.torch_seams.autograd import in_backward
from ebbtide.torch_seams.profiler import AllocationProfile, ProfilerActive, profiler_active, runs_on_another_thread

__all__ = ["AllocationEvent", "AllocationRecorder", "ProfilerActive", "peak_above", "profiler_active"]

_POLL_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class AllocationEvent:
    """One allocation (positive) or release (negative).

    Attributes:
        time_ns: when, on the profiler's clock.
        bytes: what was taken, or given back if negative.
        address: of the block.
    """

    time_ns: int
    bytes: int
    address: int = 0


def peak_above(events: Iterable[AllocationEvent]) -> int:
    """The highest level that ``events`` reach above the level before the first of them, bytes."""
    level = peak = 0
    for event in events:
        level += event.bytes
        peak = max(peak, level)
    return peak


class AllocationRecorder:
    """Records allocation events between :meth:`start` and :meth:`stop`.

    A window has to start and stop on the same side of a backward: autograd runs a backward under a copy of the
    thread's state and puts the old one back afterwards, with a profiler that was stopped inside still in it.

    Args:
        known: blocks handed out in an earlier window that are still in use, size by address.

    Attributes:
        live: after :meth:`stop`, the blocks that are still in use, those of ``known`` among them.
    """

    def __init__(self, sizes: dict[int, int] | None = None) -> None:
        self._profile = AllocationProfile()
        self._end: weakref.finalize[..., AllocationRecorder] | None = None
        self.live: dict[int, int] = dict(sizes or {})

    def start(self, patience_seconds: float = 0.0) -> None:
        """Begin recording.

        Args:
            patience_seconds: how long to wait for a recorder of another thread to stop; nobody else's profiler is
                waited for.

        Raises:
            ProfilerActive: if a profiler is active already, or still.
        """
        # A profiler that is open when the process ends takes it down, and one that nobody stops shuts out all others.
        self._end = weakref.finalize(self, _abandon, self._profile, threading.get_ident())
        end = time.monotonic() + patience_seconds
        while True:
            try:
                return self._profile.start()
            except ProfilerActive:
                if not runs_on_another_thread() or time.monotonic() >= end:
                    self._end.detach()
                    raise
            time.sleep(_POLL_SECONDS)

    def stop(self) -> list[AllocationEvent]:
        """End recording; the events in order of time."""
        self._profile.stop()
        if self._end is not None:
            self._end.detach()
        events: list[AllocationEvent] = []
        for time_ns, pointer, size in self._profile.events():
            if size > 0:
                self.live[pointer] = size
                events.append(AllocationEvent(time_ns, size, pointer))
            elif pointer in self.live:
                events.append(AllocationEvent(time_ns, -self.live.pop(pointer), pointer))
        return events


def _abandon(profile: AllocationProfile, thread: int) -> None:
    """Stop what a recorder has begun that is garbage, or open when the process ends."""
    if in_backward() or threading.get_ident() != thread:
        atexit.register(profile.stop)  # not here: see AllocationRecorder
    else:
        profile.stop()
