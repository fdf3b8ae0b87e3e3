"""What the published planners that move buffers share: which may leave, when ops begin, and when what left comes back.

Definitions (*stages* and *loads* are those of ``hybrid.choice``):
1. A *feature map* is a buffer that the forward makes and the backward reads. It may leave if it is movable and one of
   the problem's tiers takes it; it goes to the first of them that has room, in the order in which it is asked for.
2. Ops *begin* in the unplanned step where the ops before them end. All these systems estimate times by a static
   schedule over the ops; on one compute lane in captured order its critical path to an op is the sum up to it.
3. A system that is given a number, of which the byte budget says nothing, is searched for the least that fits:
   :func:`count_that_fits`, which is ours.

Everything is judged by the simulator (``published.measured``); a system's own estimates only decide what is tried.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from ebbtide.planners.base import Answer, Problem, Progress, Status, tiers_order
from ebbtide.planners.hybrid.choice import Choice
from ebbtide.planners.hybrid.floor import tiers_of
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.search.greedy import assert_within
from ebbtide.step.machine import Link
from ebbtide.step.program import Program
from ebbtide_published.planners.measured import Measured, last_use, next_use

__all__ = [
    "NO_TIER",
    "Tiers",
    "answer_of",
    "backward_reads",
    "begins",
    "count_that_fits",
    "feature_maps",
    "last_forward_read",
    "latest_load",
    "moved_bytes",
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
        use, first = next_use(program, choice, b, stage), last_use(program, choice, b, stage) + 1
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


def moved_bytes(program: Program, buffers: Iterable[int]) -> int:
    """Bytes of buffers."""
    return sum(program.buffers[b].bytes for b in buffers)
