"""What the published planners that move buffers share: which may leave, when ops begin, and what a choice comes to.

Definitions (*stages*, *loads* and *holds* are those of ``hybrid.choice``):
1. A *feature map* is a buffer that the forward makes and the backward reads. It may leave if it is movable and one of
   the problem's tiers takes it; it goes to the first of them that has room, in the order in which it is asked for.
2. Ops *begin* in the unplanned step where the ops before them end. All these systems estimate times by a static
   schedule over the ops; on one compute lane in captured order its critical path to an op is the sum up to it.
3. A copy is issued when its buffer is made, as an op that reads it would be. The buffer leaves after its last read
   before it comes back, once the copy is *written*: it is held until then, as far as the budget has room. Where it has
   none, computing waits for the copy, as an allocator does that waits for memory to be given back.

4. A system that is given a number, of which the byte budget says nothing, is searched for the least that fits:
   :func:`count_that_fits`, which is ours.

Everything is judged by the simulator; a system's own estimates only decide what is tried.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from ebbflow.planners.base import Answer, Problem, Progress, Status, tiers_order
from ebbflow.planners.hybrid.choice import Choice, schedule_of
from ebbflow.planners.hybrid.floor import tiers_of
from ebbflow.planners.keep_all import keep_all
from ebbflow.planners.search.greedy import assert_within
from ebbflow.step.arrays import Ints
from ebbflow.step.machine import Link
from ebbflow.step.program import Program
from ebbflow.step.schedule import Action, Compute, Free, Offload, Schedule
from ebbflow.step.simulate import Timeline, simulate

__all__ = [
    "NO_TIER",
    "Measured",
    "Tiers",
    "answer_of",
    "backward_reads",
    "begins",
    "count_that_fits",
    "feature_maps",
    "last_forward_read",
    "latest_load",
    "measured",
    "moved_bytes",
    "peak_stage",
    "prefetched",
    "unmoved",
]

STRIDES = 16
NO_TIER = "no tier is given that anything could move to"


def backward_reads(program: Program, b: int) -> list[int]:
    """The ops of the backward that read ``b``, ascending."""
    return [op for op in program.readers[b] if op >= program.boundary]


def last_forward_read(program: Program, b: int) -> int:
    """The last op of the forward that reads ``b``, or the one that makes it."""
    producer = program.buffers[b].producer
    assert producer is not None
    return max((op for op in program.readers[b] if op < program.boundary), default=producer)


def feature_maps(program: Program, links: Mapping[str, Link]) -> list[int]:
    """The feature maps that may leave, in the order in which they are made (definition 1)."""
    found: list[int] = []
    for op in program.ops[: program.boundary]:
        found.extend(b for b in op.outputs if backward_reads(program, b) and tiers_of(program, b, links))
    return found


class Tiers:
    """Room in the problem's tiers (definition 1)."""

    def __init__(self, program: Program, links: Mapping[str, Link]) -> None:
        self._program, self._links = program, links
        self._room = {tier: link.capacity_bytes for tier, link in links.items()}
        self.of: dict[int, str] = {}

    def take(self, b: int) -> bool:
        """Give ``b`` a place in a tier; whether there is one."""
        if b in self.of:
            return True
        takes = tiers_of(self._program, b, self._links)
        for tier, link in self._links.items():
            size = link.round_up(self._program.buffers[b].bytes)
            if tier in takes and size <= self._room[tier]:
                self.of[b] = tier
                self._room[tier] -= size
                return True
        return False

    def in_seconds(self, b: int) -> float:
        """What the way back of ``b`` takes on a free lane."""
        return self._links[self.of[b]].seconds(self._program.buffers[b].bytes, "in")

    def out_seconds(self, b: int) -> float:
        """What the way out of ``b`` takes on a free lane."""
        return self._links[self.of[b]].seconds(self._program.buffers[b].bytes, "out")


def begins(program: Program) -> list[float]:
    """When each op begins in the unplanned step, and when the last one ends (definition 2)."""
    return list(accumulate((op.seconds for op in program.ops), initial=0.0))


def latest_load(program: Program, begin: Sequence[float], first: int, use: int, seconds: float) -> int:
    """The last stage from ``first`` on whose beginning leaves ``seconds`` until op ``use`` begins, by estimate.

    At the boundary a step waits for all that is under way, so what begins before it has to be there by then. Where
    nothing is in time: the first stage of the backward, or ``first`` where that is later.
    """
    for stage in range(use, first - 1, -1):
        due = begin[program.boundary] if stage < program.boundary <= use else begin[use]
        if begin[stage] + seconds <= due:
            return stage
    return min(max(first, program.boundary), use)


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
    """A choice with its holds (definition 3), simulated.

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
    last = {b: _last_use(program, choice, b, stage) for b, stage in loaded.items()}
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


def count_that_fits(problem: Problem, total: int, plan: Callable[[int], Measured], what: str) -> tuple[int, Measured]:
    """The least count from 1 to ``total`` whose plan fits: in :data:`STRIDES` strides, then one by one in the last.

    Args:
        problem: what is asked.
        total: 1 or more.
        plan: of a count.
        what: is counted, for progress.

    Returns:
        The count and its plan; those of ``total`` where none fits, or of the last that was tried.
    """
    stride = -(-total // STRIDES)
    tried, best = 0, plan(min(stride, total))
    while True:
        count = min(tried + stride, total)
        problem.progress(Progress(f"moving {count} of {total} {what}"))
        best = plan(count) if tried else best
        fits = best.above_bytes <= problem.above_budget_bytes
        if fits or count == total or problem.interrupt:
            break
        tried = count
    for fewer in range(tried + 1, count) if fits else ():
        less = plan(fewer)
        if less.above_bytes <= problem.above_budget_bytes:
            return fewer, less
        if problem.interrupt:
            break
    return count, best


def answer_of(problem: Problem, found: Measured | None, notes: dict[str, str]) -> Answer:
    """The answer for a measured choice: it, if it fits, after simulator and legality checker have agreed to it."""
    if found is None or found.above_bytes > problem.above_budget_bytes:
        status = Status.TIME_LIMIT if problem.interrupt else Status.INFEASIBLE
        return Answer(status, None, notes=notes)
    assert_within(problem, found.schedule)
    if not found.choice.loads and not found.choice.reruns:
        return Answer(Status.OPTIMAL, found.schedule, 0.0, tiers_order(tuple(problem.links)), notes)
    return Answer(Status.TIME_LIMIT if problem.interrupt else Status.FEASIBLE, found.schedule, notes=notes)


def prefetched(problem: Problem, choice: Choice, sooner: Mapping[int, float] | None = None) -> Choice:
    """A choice whose loads stand where they are read, with each as late as its lane lets it be in time, by estimate.

    Ways back of one lane are lined up from the last one on, so that no two are under way at once.

    Args:
        problem: what is asked.
        choice: without holds.
        sooner: per buffer, by how many seconds it is to be there before it is read.
    """
    program, begin = problem.program, begins(problem.program)
    free: dict[str, float] = {}
    loads: set[tuple[int, int]] = set()
    for b, stage in sorted(choice.loads, key=lambda each: (-each[1], each[0])):
        link = problem.links[choice.tiers[b]]
        lane, seconds = link.lane("in"), link.seconds(program.buffers[b].bytes, "in")
        use, first = _next_use(program, choice, b, stage), _last_use(program, choice, b, stage) + 1
        due = min(begin[use] - (sooner or {}).get(b, 0.0), free.get(lane, begin[-1]))
        at = bisect_right(begin, due - seconds, first, use + 1) - 1
        if at < program.boundary <= use:
            due = min(due, begin[program.boundary])
            at = bisect_right(begin, due - seconds, first, program.boundary) - 1
            at = at if at >= first else min(max(first, program.boundary), use)
        loads.add((b, max(at, first)))
        free[lane] = due - seconds
    return replace(choice, loads=frozenset(loads))


def unmoved(problem: Problem, why: str) -> Answer:
    """The unplanned step as an answer, with the reason why nothing moves."""
    answer = keep_all(problem)
    return replace(answer, notes={"chosen": f"nothing: {why}"})


def _simulated(problem: Problem, choice: Choice, *, late_copies: bool = False) -> Measured:
    schedule = schedule_of(problem.program, choice)
    if late_copies:
        schedule = _copied_late(schedule)
    return Measured(choice, schedule, simulate(problem.program, schedule, problem.machine))


def _holds(last: Mapping[int, int], until: Mapping[int, int]) -> frozenset[tuple[int, int]]:
    return frozenset((b, stage) for b, stage in until.items() if stage > last[b])


def _last_use(program: Program, choice: Choice, b: int, stage: int) -> int:
    """The last stage before ``stage`` in which ``b`` is read, or the one that makes it."""
    producer = program.buffers[b].producer
    assert producer is not None
    reads = [op for op in program.readers[b] if op < stage]
    reads += [t for op, t in choice.reruns if t < stage and b in program.ops[op].inputs]
    return max(reads, default=producer)


def _copied_late(schedule: Schedule) -> Schedule:
    """The same with each copy issued right before its buffer leaves for the first time."""
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
    used = {each: _next_use(program, choice, *each) for each in choice.loads}
    latest = replace(choice, loads=frozenset((b, use) for (b, _), use in used.items()))
    peaks = _stage_peaks(_simulated(problem, latest))
    loads: set[tuple[int, int]] = set()
    for (b, stage), use in sorted(used.items(), key=lambda each: (each[1], each[0])):
        size, first = program.buffers[b].bytes, use
        while first > stage and peaks[first - 1] + size <= problem.above_budget_bytes:
            first -= 1
        peaks[first:use] += size
        loads.add((b, first))
    return replace(choice, loads=frozenset(loads))


def _next_use(program: Program, choice: Choice, b: int, stage: int) -> int:
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


def moved_bytes(program: Program, buffers: Iterable[int]) -> int:
    """Bytes of buffers."""
    return sum(program.buffers[b].bytes for b in buffers)
