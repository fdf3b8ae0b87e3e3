"""The true peak of whatever runs inside a ``with`` block, as the device's allocator counts it."""

from __future__ import annotations

from types import TracebackType

import torch

from ebbtide.measurement.card_peaks import allocated_peak, give_back_peak, reset_peak
from ebbtide.measurement.cpu_allocations import AllocationEvent, AllocationRecorder, ProfilerActive, peak_above
from ebbtide.measurement.reserved import Reserved, requested_now, reserved_at_peak
from ebbtide.measurement.resident import device_of, resident_bytes
from ebbtide.measurement.step_record import give_way

__all__ = ["StepGauge", "measure"]


class StepGauge:
    """The peak of one step from inside its two graphs, for a check while somebody else's program trains.

    On CPU the forward's and the backward's allocations are recorded in a window each (what lies between them is
    not seen); on CUDA the allocator's peak is reset once and read once.

    Attributes:
        above_bytes: the highest level above the forward's start; valid after the backward's window.
        requested_above_bytes: of a card's allocator, what it was asked for, likewise; ``None`` if it does not say.
        reserved: what the allocator held of a card, likewise; ``None`` on CPU.
        disturbed: whether somebody's profiler ran at the begin of a window, so that nothing is known.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self.disturbed = False
        self._recorder: AllocationRecorder | None = None
        self._level = 0
        self._before: int | None = None
        self._requested = 0
        self.above_bytes = 0
        self.requested_above_bytes: int | None = None
        self.reserved: Reserved | None = None

    def begin(self) -> None:
        """The forward or the backward graph starts."""
        if self._cuda:
            if self._before is None:
                self._before = reset_peak()
                self._level, self._requested = torch.cuda.memory_allocated(), requested_now()
            return
        if self.disturbed:
            return
        self._recorder = AllocationRecorder(self._recorder.live if self._recorder is not None else None)
        try:
            self._recorder.start()
        except ProfilerActive:
            self.disturbed = True

    def end(self) -> None:
        """It returned or raised."""
        if self._cuda:
            self.reserved = reserved_at_peak()
            self.above_bytes = self.reserved.allocated_bytes - self._level
            if (requested := self.reserved.requested_bytes) is not None:
                self.requested_above_bytes = requested - self._requested
            return
        if self.disturbed:
            return
        assert self._recorder is not None
        events = self._recorder.stop()
        self.above_bytes = max(self.above_bytes, self._level + peak_above(events))
        self._level += sum(event.bytes for event in events)

    def close(self) -> None:
        """The step has ended: a card's statistic is left as it would have been."""
        if self._before is not None:
            give_back_peak(self._before)

    def forget(self, size_bytes: int) -> None:
        """So many bytes go between the two windows, where on CPU nobody sees it: mutations, old gradients."""
        self._level -= 0 if self._cuda else size_bytes


class measure:
    """Measure the peak of allocated memory inside the block.

    Args:
        *roots: what is resident at the start: modules, optimizers, tensors or containers of these. On CPU their
            bytes are the start level; on CUDA they only tell the device and the allocator is asked.

    Attributes:
        start_bytes: level at the block's start.
        above_bytes: the highest level inside the block above the start; valid after the block.
        peak_bytes: their sum.
        events: on CPU every block that was handed out or given back, in order of time; valid after the block.

    Raises:
        RuntimeError: on CPU, if a profiler is active already.
    """

    def __init__(self, *roots: object) -> None:
        self._roots = roots
        self._cuda = device_of(roots) == "cuda"
        self._recorder: AllocationRecorder | None = None
        self._before = 0
        self.start_bytes = 0
        self.above_bytes = 0
        self.events: list[AllocationEvent] = []

    @property
    def peak_bytes(self) -> int:
        """Highest level inside the block, bytes."""
        return self.start_bytes + self.above_bytes

    def __enter__(self) -> measure:
        if self._cuda:
            torch.cuda.synchronize()
            self._before = reset_peak()
            self.start_bytes = torch.cuda.memory_allocated()
        else:
            self.start_bytes = resident_bytes(self._roots)
            self._recorder = AllocationRecorder()
            give_way()
            self._recorder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cuda:
            torch.cuda.synchronize()
            self.above_bytes = allocated_peak() - self.start_bytes
            give_back_peak(self._before)
        elif self._recorder is not None:
            self.events = self._recorder.stop()
            self.above_bytes = peak_above(self.events)
