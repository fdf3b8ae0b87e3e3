"""What user code takes between a step's two graphs (a loss outside, and its backward down to ours), and after them.

On CUDA the allocator is asked. On CPU allocations have to be recorded from the forward's return to the backward's
start, and a recording has to end outside of a backward (``cpu_allocations``): for that one step
``torch.autograd.backward`` and ``torch.autograd.grad`` are watched, so that the recording ends when they return.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ebbtide.measurement.card_peaks import allocated_peak, give_back_peak, reset_peak
from ebbtide.measurement.cpu_allocations import AllocationRecorder, ProfilerActive
from ebbtide.torch_seams.autograd import BackwardWatch, in_backward

__all__ = ["UserWindowGauge"]

# Blocks of these sizes, each taken and given back at once, mark the backward's start: few bytes, and nobody else's.
_MARK_BYTES = (61, 53, 59, 47)
_MARK = [signed for size in _MARK_BYTES for signed in (size, -size)]
_END_BYTES = (47, 59, 53, 61)  # likewise, of the backward graph's return
_END = [signed for size in _END_BYTES for signed in (size, -size)]


class UserWindowGauge:
    """Measures one step's user code between :meth:`begin` and :meth:`mark`, and from :meth:`returned` to :meth:`end`.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        done: called after the backward with the peak and with what was left at the backward's start, bytes above the
            level that the forward left; and with the same at the backward's end, above the level at which the backward
            graph returned.
    """

    def __init__(self, device: str, done: Callable[[int, int, int, int], None]) -> None:
        self._cuda = device == "cuda"
        self._done = done
        self._level = self._highest = 0
        self._thread = threading.get_ident()  # a profiler has to be stopped where it was started
        self._recorder: AllocationRecorder | None = None
        self._watch = BackwardWatch(self.end)
        self._marked = self._returned = False
        self._before = (0, 0)
        self.open = False

    def begin(self) -> None:
        """The forward has returned. Does nothing while somebody's profiler runs."""
        if self._cuda:
            self._highest = reset_peak()
            self._level = torch.cuda.memory_allocated()
        else:
            self._recorder = AllocationRecorder()
            try:
                self._recorder.start()
            except ProfilerActive:
                self._recorder = None
                return
        self._watch.open()
        self.open = True

    def mark(self) -> None:
        """The backward graph starts."""
        if not self.open or self._marked:
            return
        self._marked = True
        if self._cuda:
            self._before = self._on_cuda()
        else:
            for size in _MARK_BYTES:
                torch.empty(size, dtype=torch.uint8)

    def returned(self) -> None:
        """The backward graph has returned."""
        if not self.open or self._returned:
            return
        self._returned = True
        if self._cuda:
            self._highest = max(self._highest, reset_peak())
            self._level = torch.cuda.memory_allocated()
        else:
            for size in _END_BYTES:
                torch.empty(size, dtype=torch.uint8)

    def _on_cuda(self) -> tuple[int, int]:
        return allocated_peak() - self._level, torch.cuda.memory_allocated() - self._level

    def end(self) -> None:
        """The backward has returned, or the step is given up. Inside of a backward, its end is waited for."""
        if not self.open or in_backward() or self._thread != threading.get_ident():
            return
        self.open = False
        self._watch.close()
        if self._recorder is None:
            if self._returned:
                self._done(*self._before, *self._on_cuda())
            if self._cuda:
                give_back_peak(self._highest)
            return
        events = [event.bytes for event in self._recorder.stop()]
        start, end = _find(events, _MARK), _find(events, _END)
        if self._returned and 0 <= start < end:
            self._done(*_peak_and_level(events[:start]), *_peak_and_level(events[end + len(_END) :]))


def _find(events: list[int], mark: list[int]) -> int:
    starts = range(len(events) - len(mark) + 1)
    return next((start for start in starts if events[start : start + len(mark)] == mark), -1)


def _peak_and_level(events: list[int]) -> tuple[int, int]:
    level = peak = 0
    for size in events:
        level += size
        peak = max(peak, level)
    return peak, level
