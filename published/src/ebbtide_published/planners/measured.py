"""A choice of what to move, with its copies held until they are written, as the simulator sees it.

Definitions (*stages*, *loads* and *holds* are those of ``hybrid.choice``):
1. A copy is issued when its buffer is made, as an op that reads it would be. The buffer leaves after its last read
   before it comes back, once the copy is *written*: it is held until then, as far as the budget has room. Where it has
   none, computing waits for the copy, as an allocator does that waits for memory to be given back.
2. *Blocking*, computing waits for every copy where its buffer leaves, with *late copies* for all of it.
3. *Late loads* are put off to where the budget has room for them, again as an allocator waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ebbtide.planners.base import Problem
from ebbtide.planners.hybrid.choice import Choice, schedule_of
from ebbtide.step.arrays import Ints
from ebbtide.step.program import Program
from ebbtide.step.schedule import Action, Compute, Free, Offload, Schedule
from ebbtide.step.simulate import Timeline, simulate

__all__ = ["Measured", "last_use", "measured", "next_use", "peak_stage"]


@dataclass(frozen=True)
class Measured:
    """A choice as the simulator sees it.

    Attributes:
        choice: with its holds.
        schedule: that follows.
        timeline: of it.
    """

    choice: Choice
    schedule: Schedule
    timeline: Timeline

    @property
    def above_bytes(self) -> int:
        """The peak above the step's start."""
        return self.timeline.above_bytes

    @property
    def seconds(self) -> float:
        """When the last action ends."""
        return self.timeline.seconds


def measured(
    problem: Problem, choice: Choice, *, blocking: bool = False, late_copies: bool = False, late_loads: bool = False
) -> Measured:
    """A choice with its holds (definition 1), simulated.

    Args:
        problem: what is asked.
        choice: without holds.
        blocking: whether computing waits for every copy where its buffer leaves, so that there are no holds.
        late_copies: whether a copy is issued only where its buffer leaves: with ``blocking`` computing waits for all
            of it.
        late_loads: whether a load is put off to where the budget has room for it.
    """
    program = problem.program
    if late_loads:
        choice = _put_off(problem, choice)
    if blocking or not choice.loads:
        return _simulated(problem, choice, late_copies=late_copies)
    loaded: dict[int, int] = {}
    for b, stage in choice.loads:
        loaded[b] = min(stage, loaded.get(b, stage))
    last = {b: last_use(program, choice, b, stage) for b, stage in loaded.items()}
    until = {b: stage - 1 for b, stage in loaded.items()}
    full = _simulated(problem, replace(choice, holds=_holds(last, until)))
    ends, copied = _stage_ends(full), _copies(full)
    for b in until:
        written = int(np.searchsorted(ends, copied.get(b, 0.0) * (1.0 - 1e-12)))
        until[b] = min(max(written, last[b]), until[b])
    found = _simulated(problem, replace(choice, holds=_holds(last, until)))
    if found.above_bytes > problem.above_budget_bytes:
        _cut(problem, found, last, until, copied)
        found = _simulated(problem, replace(choice, holds=_holds(last, until)))
    return found


def _simulated(problem: Problem, choice: Choice, *, late_copies: bool = False) -> Measured:
    schedule = schedule_of(problem.program, choice)
    if late_copies:
        schedule = _copied_late(schedule)
    return Measured(choice, schedule, simulate(problem.program, schedule, problem.machine))


def _holds(last: Mapping[int, int], until: Mapping[int, int]) -> frozenset[tuple[int, int]]:
    return frozenset((b, stage) for b, stage in until.items() if stage > last[b])


def last_use(program: Program, choice: Choice, b: int, stage: int) -> int:
    """The last stage before ``stage`` in which ``b`` is read, or the one that makes it."""
    producer = program.buffers[b].producer
    assert producer is not None
    reads = [op for op in program.readers[b] if op < stage]
    reads += [t for op, t in choice.reruns if t < stage and b in program.ops[op].inputs]
    return max(reads, default=producer)


def _copied_late(schedule: Schedule) -> Schedule:
    """The schedule with each copy issued right before its buffer leaves for the first time."""
    copies = {each.buffer: each for each in schedule.actions if isinstance(each, Offload)}
    actions: list[Action] = []
    for action in schedule.actions:
        if isinstance(action, Free) and action.buffer in copies:
            actions.append(copies.pop(action.buffer))
        if not isinstance(action, Offload):
            actions.append(action)
    return Schedule(tuple(actions))


def _put_off(problem: Problem, choice: Choice) -> Choice:
    """Loads that come earlier than their readers, as early as the budget has room for them from there on."""
    program = problem.program
    used = {each: next_use(program, choice, *each) for each in choice.loads}
    latest = replace(choice, loads=frozenset((b, use) for (b, _), use in used.items()))
    peaks = _stage_peaks(_simulated(problem, latest))
    loads: set[tuple[int, int]] = set()
    for (b, stage), use in sorted(used.items(), key=lambda each: (each[1], each[0])):
        size, first = program.buffers[b].bytes, use
        room = problem.above_budget_bytes - size
        early = use != program.boundary or peaks[use] <= room  # what comes before the boundary is there beside tangents
        while first > stage and early and peaks[first - 1] <= room:
            first -= 1
        peaks[first : use + (first < use == program.boundary)] += size
        loads.add((b, first))
    return replace(choice, loads=frozenset(loads))


def next_use(program: Program, choice: Choice, b: int, stage: int) -> int:
    """The first stage from ``stage`` on in which ``b`` is read."""
    reads = [op for op in program.readers[b] if op >= stage]
    reads += [t for op, t in choice.reruns if t >= stage and b in program.ops[op].inputs]
    return min(reads, default=stage)


def _first_runs(found: Measured) -> list[int]:
    """Per stage, the action that ends it: the first run of its op."""
    at: list[int] = []
    for index, action in enumerate(found.schedule.actions):
        if isinstance(action, Compute) and action.op == len(at):
            at.append(index)
    return at


def _stage_peaks(found: Measured) -> Ints:
    """Per stage, the most bytes in it."""
    runs = _first_runs(found)
    return np.maximum.reduceat(found.timeline.peak_bytes, [0, *(run + 1 for run in runs[:-1])])


def peak_stage(found: Measured) -> int:
    """The stage in which a plan peaks."""
    return int(np.argmax(_stage_peaks(found)))


def _stage_ends(found: Measured) -> list[float]:
    """When each stage ends."""
    return found.timeline.end_seconds[_first_runs(found)].tolist()


def _copies(found: Measured) -> dict[int, float]:
    """Per buffer that leaves, when its copy is written."""
    ends = found.timeline.end_seconds
    actions = enumerate(found.schedule.actions)
    return {action.buffer: float(ends[i]) for i, action in actions if isinstance(action, Offload)}


def _cut(
    problem: Problem,
    found: Measured,
    last: Mapping[int, int],
    until: dict[int, int],
    copied: Mapping[int, float],
) -> None:
    """End holds earlier where the budget has no room for them, those first whose copies are written first."""
    program = problem.program
    peaks = _stage_peaks(found)
    by_time = sorted(until, key=lambda b: (copied.get(b, 0.0), b))
    for stage in range(len(peaks)):
        for b in by_time:
            if peaks[stage] <= problem.above_budget_bytes:
                break
            if last[b] < stage <= until[b]:
                peaks[stage : until[b] + 1] -= program.buffers[b].bytes
                until[b] = stage - 1
