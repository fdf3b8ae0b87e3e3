"""What user code takes between a step's two graphs: a loss outside the model, and its backward down to ours.

On CUDA the allocator is asked. On CPU allocations have to be recorded from the forward's return to the backward's
start, and a recording has to end outside of a backward (``cpu_allocations``): for that one step
``torch.autograd.backward`` and ``torch.autograd.grad`` are watched, so that the recording ends when they return.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ebbflow.measurement.cpu_allocations import AllocationRecorder, profiler_active
from ebbflow.torch_seams.autograd import BackwardWatch, in_backward

__all__ = ["BetweenGauge"]

# Blocks of these sizes, each taken and given back at once, mark the backward's start: few bytes, and nobody else's.
_MARK_BYTES = (61, 53, 59, 47)
_MARK = [signed for size in _MARK_BYTES for signed in (size, -size)]


class BetweenGauge:
    """Measures one step's user code between :meth:`begin` and :meth:`mark`.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        done: called with the peak and with what was left at the backward's start, bytes above the level that the
            forward left; on CPU after the backward.
    """

    def __init__(self, device: str, done: Callable[[int, int], None]) -> None:
        self._cuda = device == "cuda"
        self._done = done
        self._level = 0
        self._thread = threading.get_ident()  # a profiler has to be stopped where it was started
        self._recorder: AllocationRecorder | None = None
        self._watch = BackwardWatch(self.end)
        self._marked = False
        self.open = False

    def begin(self) -> None:
        """The forward has returned. Does nothing while somebody's profiler runs."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._level = torch.cuda.memory_allocated()
        elif profiler_active():
            return
        else:
            self._recorder = AllocationRecorder()
            self._recorder.start()
            self._watch.open()
        self.open = True

    def mark(self) -> None:
        """The backward graph starts."""
        if not self.open or self._marked:
            return
        self._marked = True
        if self._cuda:
            self.open = False
            self._done(torch.cuda.max_memory_allocated() - self._level, torch.cuda.memory_allocated() - self._level)
        else:
            for size in _MARK_BYTES:
                torch.empty(size, dtype=torch.uint8)

    def end(self) -> None:
        """The backward has returned, or the step is given up. Inside of a backward, its end is waited for."""
        if not self.open or in_backward() or self._thread != threading.get_ident():
            return
        self.open = False
        self._watch.close()
        if self._recorder is None:
            return
        events = [event.bytes for event in self._recorder.stop()]
        starts = range(len(events) - len(_MARK) + 1)
        marks = (start for start in starts if events[start : start + len(_MARK)] == _MARK)
        if self._marked and (mark := next(marks, None)) is not None:
            level = peak = 0
            for size in events[:mark]:
                level += size
                peak = max(peak, level)
            self._done(peak, level)
