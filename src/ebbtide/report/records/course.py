"""The course of a step: what runs or moves when, and which copies are in memory meanwhile. Pages and traces draw it.

Definitions:
1. A *moment* is an action other than a ``Free``: an op runs, a transfer is issued, or the boundary is passed. What is
   in memory during it is ``Timeline.peak_bytes`` of that action, without the resident part.
2. A *stay* is a copy of a buffer (``report.records.copies``), there from its *first* moment to its *last*, both
   included; or a result that is dropped as soon as its op ends, there at that one moment. The bytes of all stays of a
   moment are at most the moment's; the rest is workspace, second results of a rerun, generator states and user code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ebbtide.report.records.copies import copies_of
from ebbtide.step.arrays import Ints
from ebbtide.step.plan import PlanRecord
from ebbtide.step.program import Program
from ebbtide.step.schedule import Boundary, Compute, Free, Offload, Reload, Schedule, kept_outputs
from ebbtide.step.simulate import Timeline
from ebbtide.step.unplanned import unplanned_schedule

__all__ = ["Course", "Moment", "Stay", "course_of", "planned_course", "unplanned_course"]


@dataclass(frozen=True, slots=True)
class Moment:
    """One op run or transfer (definition 1).

    Attributes:
        action: what happens; never a ``Free``.
        again: whether the op has run before.
        bytes: the most that is in memory meanwhile, above the step's start.
        begin_seconds: on its lane.
        end_seconds: likewise.
        wait_seconds: for how long the compute lane has waited for a transfer just before.
        lane: its name.
    """

    action: Compute | Offload | Reload | Boundary
    again: bool
    bytes: int
    begin_seconds: float
    end_seconds: float
    wait_seconds: float
    lane: str


@dataclass(frozen=True, slots=True)
class Stay:
    """One stay of a buffer in memory (definition 2).

    Attributes:
        buffer: its index.
        first: the moment that makes or reloads it.
        last: the last moment at which it is there.
        later: whether the buffer was there before.
        reloaded: whether it comes back from another tier.
    """

    buffer: int
    first: int
    last: int
    later: bool
    reloaded: bool


@dataclass(frozen=True)
class Course:
    """A step on its way.

    Attributes:
        moments: in the order of the schedule.
        stays: by their first moment.
        wait_seconds: of all waits, those at frees among them.
    """

    moments: tuple[Moment, ...]
    stays: tuple[Stay, ...]
    wait_seconds: float = 0.0

    @property
    def boundary(self) -> int:
        """The moment of the boundary."""
        return next((i for i, each in enumerate(self.moments) if isinstance(each.action, Boundary)), len(self.moments))

    @property
    def peak(self) -> int:
        """The first moment with the most bytes."""
        return max(range(len(self.moments)), key=lambda i: (self.moments[i].bytes, -i), default=0)


def planned_course(plan: PlanRecord) -> Course:
    """The step as ``plan`` runs it."""
    return course_of(plan.program, plan.schedule, plan.timeline)


def unplanned_course(plan: PlanRecord) -> Course:
    """The program of ``plan`` in captured order, every buffer freed at its last use."""
    return course_of(plan.program, unplanned_schedule(plan.program), plan.baseline)


def course_of(program: Program, schedule: Schedule, timeline: Timeline) -> Course:
    """The course of ``schedule``, which must be legal."""
    peaks, waits = timeline.peak_bytes.tolist(), timeline.wait_seconds.tolist()
    begin, end = timeline.start_seconds.tolist(), timeline.end_seconds.tolist()
    ran: set[int] = set()
    moments: list[Moment] = []
    waited = 0.0
    for index, action in enumerate(schedule.actions):
        waited += waits[index]
        if isinstance(action, Free):
            continue  # what it waits for is waited for by the next moment as well
        again = isinstance(action, Compute) and action.op in ran
        if isinstance(action, Compute):
            ran.add(action.op)
        lane = timeline.lanes[index] if timeline.lanes else "compute"
        moments.append(Moment(action, again, peaks[index], begin[index], end[index], waited, lane))
        waited = 0.0
    return Course(tuple(moments), _stays(program, schedule), timeline.waited_seconds)


def _stays(program: Program, schedule: Schedule) -> tuple[Stay, ...]:
    moment, count = _moment_of(schedule)
    copies = copies_of(program, schedule)
    spans: list[tuple[int, int, int]] = [(copy.start, copy.end, b) for b, own in enumerate(copies) for copy in own]
    spans += [(index, index, b) for index, b in _dropped_at_once(program, schedule)]
    found: list[Stay] = []
    seen: set[int] = set()
    for start, end, buffer in sorted(spans):
        # A free stands after the last moment at which its buffer is there; the boundary and the end likewise.
        last = (int(moment[end]) if end < len(moment) else count) - (start < end)
        reloaded = isinstance(schedule.actions[start], Reload)
        found.append(Stay(buffer, int(moment[start]), last, buffer in seen, reloaded))
        seen.add(buffer)
    return tuple(found)


def _dropped_at_once(program: Program, schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Results that nobody wants when their op ends, by action and buffer; those that were there already are none."""
    kept = kept_outputs(program, schedule)
    live: set[int] = set()
    ran: set[int] = set()
    for index, action in enumerate(schedule.actions):
        match action:
            case Compute(op):
                made = program.made_by_rerun(op) if op in ran else program.ops[op].outputs
                yield from ((index, b) for b in made if b not in live and b not in kept[index])
                ran.add(op)
                live.update(kept[index])
            case Free(buffer):
                live.discard(buffer)
            case Reload(buffer):
                live.add(buffer)
            case Boundary():
                live.difference_update(program.mutations)
            case Offload():
                pass


def _moment_of(schedule: Schedule) -> tuple[Ints, int]:
    """Per action, its moment, of a ``Free`` that of the next action that is one; and how many moments there are."""
    is_moment = np.array([not isinstance(action, Free) for action in schedule.actions], np.int64)
    return np.cumsum(is_moment) - is_moment, int(is_moment.sum())
