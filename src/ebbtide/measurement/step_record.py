"""The allocator's record of one whole step in somebody else's program, in parts: :class:`Part`.

On CUDA the allocator is asked wherever a part ends. Its peak is reset there where that is needed to know what each part
took; where it is not, a part is known that has raised it. On CPU allocations are recorded (``cpu_allocations``), and
marks in the record say where parts end. A recording has to end outside of a backward, so for that step
``torch.autograd.backward`` and ``torch.autograd.grad`` are watched. It gives way to a profiler of the user's.
"""

from __future__ import annotations

import enum
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch

from ebbtide.measurement.card_peaks import give_back_peak, levels, reset_peak
from ebbtide.measurement.cpu_allocations import AllocationEvent, AllocationRecorder, ProfilerActive, peak_above
from ebbtide.torch_seams.autograd import BackwardWatch, in_backward, when_backward_ends
from ebbtide.torch_seams.patches import Patch
from ebbtide.torch_seams.profiler import before_other_profiles
from ebbtide.torch_seams.storages import StorageWatch

__all__ = [
    "Before",
    "MarkedRecord",
    "Part",
    "Recorder",
    "StepRecord",
    "Taken",
    "ask_to_record",
    "give_way",
    "note_backward",
]

_recording: set[StepRecord] = (
    set()
)  # on CPU: alive until they are over, since garbage may not stop inside of a backward


def give_way() -> None:
    """Somebody is about to record allocations on CPU: no step is recorded any more."""
    for each in list(_recording):
        each.end()


def ask_to_record() -> None:
    """A step is about to run that should be recorded or measured: once, it waits for another's record to end."""
    for each in list(_recording):
        each.asked += 1
        if each.given_up or each.asked > 1:
            each.end()


def note_backward(number: int) -> None:
    """The backward of that step begins, which frees what its forward has taken (``Before``)."""
    for each in list(_recording):
        if number < each.before.number and number not in each.before.recorded:
            each.is_known = False


@dataclass(frozen=True, slots=True)
class Before:
    """What the steps that are pending when a record begins have taken, on CPU.

    Attributes:
        number: of the recorded step; those before it have lower ones.
        recorded: numbers of those whose blocks are known.
        blocks: that they have taken, size by address: nobody else sees it where they are given back.
    """

    number: int = 0
    recorded: frozenset[int] = frozenset()
    blocks: Mapping[int, int] = field(default_factory=dict[int, int])


class Part(enum.Enum):
    """A part of a step, in order; the value says it in words."""

    FORWARD = "its forward"
    WINDOW = "code outside the model, between forward and backward"
    BACKWARD = "its backward"
    AFTER = "hooks on parameters, or sums with gradients from outside the step"
    RETAINED = "code after a backward that retained its graph"
    AGAIN = "another backward through the same graph"


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes of a part.

    Attributes:
        start_bytes: level at which it began, with what was resident before the step.
        peak_bytes: at the most, above that.
        left_bytes: at its end, above that.
        own_peak_bytes: at the most of what it has taken itself, without what it gave back of earlier parts, such as
            outputs, which may stay in another step; a card's allocator does not tell the two apart.
        own_left_bytes: likewise, at its end.
    """

    start_bytes: int
    peak_bytes: int
    left_bytes: int
    own_peak_bytes: int
    own_left_bytes: int

    @property
    def highest_bytes(self) -> int:
        """Its highest level."""
        return self.start_bytes + self.peak_bytes

    @classmethod
    def joined(cls, parts: Sequence[Taken]) -> Taken:
        """Of parts that follow on each other."""
        start, own_peak, own_left = parts[0].start_bytes, 0, 0
        for each in parts:
            own_peak = max(own_peak, own_left + each.own_peak_bytes)
            own_left += each.own_left_bytes
        left = parts[-1].start_bytes + parts[-1].left_bytes - start
        return cls(start, max(each.highest_bytes for each in parts) - start, left, own_peak, own_left)


class _OnCpu:
    """The recorder, with marks: blocks of sizes that nobody else takes in this order, each given back at once."""

    _SIZES = ((61, 53, 59, 47), (53, 47, 61, 59), (59, 61, 47, 53), (47, 59, 53, 61), (61, 47, 53, 59))

    def __init__(self, start_bytes: int, freed: Sequence[StorageWatch], blocks: Mapping[int, int]) -> None:
        self._start_bytes, self._may_go = start_bytes, freed
        self._gone = [0]
        self._recorder = AllocationRecorder(dict(blocks))

    @property
    def blocks(self) -> Mapping[int, int]:
        """When it has ended: those in use, size by address."""
        return self._recorder.live

    def begin(self) -> bool:
        try:
            self._recorder.start()
        except ProfilerActive:
            return False
        return True

    def mark(self) -> None:
        for size in self._SIZES[(len(self._gone) - 1) % len(self._SIZES)]:
            torch.empty(size, dtype=torch.uint8, device="cpu")
        self._gone.append(sum(each.bytes for each in self._may_go if not each.alive))

    def end(self) -> list[Taken]:
        events = self._recorder.stop()
        found: list[Taken] = []
        level = self._start_bytes
        marks_made = itertools.islice(itertools.cycle(self._SIZES), len(self._gone) - 1)
        for sizes, gone in zip((*marks_made, ()), self._gone, strict=True):
            marks = [signed for size in sizes for signed in (size, -size)]
            end = _find(events, marks) if marks else len(events)
            if end < 0:
                break
            part = events[:end]
            peak, left = _peak_and_level(part)
            found.append(Taken(level - gone, peak, left, *_peak_and_level(_own(part))))
            level, events = level + left, events[end + len(marks) :]
        return found


class _OnCard:
    """The allocator's own statistic; with ``resets`` it begins anew with every part, and is given back at the end."""

    def __init__(self, *, resets: bool) -> None:
        self._resets = resets
        self._found: list[Taken] = []
        self._highest = self._last = self._level = 0
        self.blocks: Mapping[int, int] = {}  # the allocator knows them

    def begin(self) -> bool:
        self._last, self._level = levels()
        if self._resets:
            self._highest = self._last
            reset_peak()
        return True

    def mark(self) -> None:
        peak, level = levels()
        known = self._resets or peak != self._last  # lower: somebody has reset it within the part
        highest = peak if known else max(level, self._level)
        peak_bytes, left = highest - self._level, level - self._level
        self._found.append(Taken(self._level, peak_bytes, left, peak_bytes, left))
        self._highest, self._last, self._level = max(self._highest, peak), peak, level
        if self._resets:
            reset_peak()

    def end(self) -> list[Taken]:
        self.mark()
        if self._resets:
            give_back_peak(self._highest)
        return self._found


class Recorder(Protocol):
    """What a pending step tells of itself as it runs."""

    def begin(self) -> None:
        """Its forward graph starts."""
        ...

    def forward_returned(self) -> None:
        """The model's forward has returned."""
        ...

    def backward_begins(self, *, retains: bool) -> None:
        """Its backward graph starts, for the first time or once more."""
        ...

    def backward_returned(self) -> None:
        """Its backward graph has returned."""
        ...

    def end(self) -> None:
        """It is given up, or its graph is gone."""
        ...

    def end_for(self, number: int) -> Before:
        """End; what the step of that ``number``, which is about to run, finds of it."""
        ...


class StepRecord:
    """Records one step from :meth:`begin` to its end.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        start_bytes: resident before the step, on CPU; a card's allocator knows.
        freed: watches what is resident and may go in the step, on CPU, where nobody sees that.
        before: what other pending steps have taken.
        resets: whether a card's statistic is reset.
        done: called once with the record, when it is over.
        returned: called without arguments when the user's backward has returned and the record is over; what it raises
            is what the caller of the backward gets.

    Attributes:
        steady: whether a card is read and nothing else done.
        parts: what each took, as far as the step has come; valid when it is over.
        retains: whether the last backward retained the graph, so that the record goes on after it.
        before: as given.
        is_known: whether all that was freed in it is known.
        asked: how often others would have recorded.
        given_up: whether it ends as soon as it can.
    """

    def __init__(
        self,
        device: str,
        *,
        start_bytes: int,
        freed: Sequence[StorageWatch] = (),
        before: Before | None = None,
        resets: bool = True,
        done: Callable[[Self], None],
        returned: Callable[[], None],
    ) -> None:
        self.parts: dict[Part, Taken] = {}
        self.retains = False
        self.before, self.is_known, self.asked = before or Before(), True, 0
        blocks = self.before.blocks
        self._source = _OnCard(resets=resets) if device == "cuda" else _OnCpu(start_bytes, freed, blocks)
        self.steady = device == "cuda" and not resets
        self._done, self._tell = done, returned
        self._thread = threading.get_ident()  # a profiler has to be stopped where it was started
        self._patches: list[BackwardWatch | Patch] = []
        self._part = Part.FORWARD
        self.given_up = False
        self.open = False

    @property
    def highest_bytes(self) -> int:
        """The highest level of the whole step."""
        return max((each.highest_bytes for each in self.parts.values()), default=0)

    @property
    def is_whole(self) -> bool:
        """Whether the step has come to the end of a backward, and is known."""
        return self.is_known and Part.AFTER in self.parts

    def end_for(self, number: int) -> Before:
        """End; what the step of that ``number``, which is about to run, finds of it."""
        was_open = self.open
        self.end()
        if not was_open or self.open:
            return Before(number)
        return Before(number, self.before.recorded | {self.before.number}, self._source.blocks)

    def begin(self) -> None:
        """The forward graph starts. Does nothing while somebody's profiler runs."""
        self.open = self._source.begin()
        if self.open and isinstance(self._source, _OnCpu):
            _recording.add(self)

    def forward_returned(self) -> None:
        """The model's forward has returned."""
        if self._next(Part.FORWARD) and not self.steady:
            self._patches = [BackwardWatch(self._a_backward_ends), before_other_profiles(give_way)]
            for each in self._patches:
                each.open()

    def backward_begins(self, *, retains: bool) -> None:
        """The backward graph starts, for the first time or once more."""
        self.retains = retains
        if not self._next(Part.WINDOW):
            self._next(Part.RETAINED)

    def backward_returned(self) -> None:
        """The backward graph has returned."""
        if self._next(Part.BACKWARD) and self.steady:
            when_backward_ends(self._a_backward_ends)

    def end(self) -> None:
        """The step is given up, or its graph is gone. Inside of a backward, its end is waited for."""
        if not self.open or (not self.steady and (in_backward() or self._thread != threading.get_ident())):
            self.given_up = True
            return
        self.open = False
        _recording.discard(self)
        for each in self._patches:
            each.close()
        self._take(self._source.end())
        done, self._done = self._done, _nothing  # which holds much
        done(self)

    def _take(self, taken: list[Taken]) -> None:
        self.parts = dict(zip(Part, taken, strict=False))

    def _next(self, part: Part) -> bool:
        """End ``part``, if it is the one that the step is in."""
        if not self.open or self._part is not part:
            return False
        self._source.mark()
        order = list(Part)
        self._part = order[order.index(part) + 1]
        return True

    def _a_backward_ends(self) -> None:
        """One of any model; it may be inside of another."""
        if not self.steady and (in_backward() or self._thread != threading.get_ident()):
            return
        if self.given_up:
            self.end()
        elif self._part is Part.BACKWARD or (self._part in (Part.AFTER, Part.AGAIN) and not self.retains):
            self.end()
            self._tell()
        else:
            self._next(Part.AFTER)


class MarkedRecord(StepRecord):
    """Of a step in several pieces, with a mark wherever one of them begins or ends.

    Attributes:
        taken: what each part took between two marks, and after the last; valid when it is over.
    """

    taken: Sequence[Taken] = ()
    _backwards = 0

    @property
    def highest_bytes(self) -> int:
        """The highest level of the whole step."""
        return max((each.highest_bytes for each in self.taken), default=0)

    @property
    def is_whole(self) -> bool:
        """Whether the step has come to the end of a backward, and is known."""
        return self.is_known and bool(self._backwards) and bool(self.taken)

    def mark(self) -> None:
        """A piece begins or ends."""
        if self.open:
            self._source.mark()

    def forward_returned(self) -> None:
        """The model's forward has returned."""
        if self.open:
            self._patches = [BackwardWatch(self._a_backward_ends), before_other_profiles(give_way)]
            for each in self._patches:
                each.open()

    def backward_begins(self, *, retains: bool) -> None:
        """The backward of a piece starts."""
        self._backwards += 1
        self.retains = retains
        self.mark()

    def backward_returned(self) -> None:
        """The backward of a piece has returned."""
        self.mark()

    def _take(self, taken: list[Taken]) -> None:
        self.taken = taken

    def _a_backward_ends(self) -> None:
        if in_backward() or self._thread != threading.get_ident():
            return
        if self.given_up or self._backwards:
            self.end()
            self._tell()


def _nothing(_: StepRecord) -> None:
    """Nobody is told."""


def _find(events: Sequence[AllocationEvent], mark: list[int]) -> int:
    sizes = [each.bytes for each in events]
    starts = range(len(events) - len(mark) + 1)
    return next((start for start in starts if sizes[start : start + len(mark)] == mark), -1)


def _own(events: Sequence[AllocationEvent]) -> list[AllocationEvent]:
    """Those of blocks that were taken among them."""
    taken: set[int] = set()
    own: list[AllocationEvent] = []
    for each in events:
        if each.bytes > 0:
            taken.add(each.address)
        if each.address in taken:
            own.append(each)
    return own


def _peak_and_level(events: Sequence[AllocationEvent]) -> tuple[int, int]:
    return peak_above(events), sum(each.bytes for each in events)
