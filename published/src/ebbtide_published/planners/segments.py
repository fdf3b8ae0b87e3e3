"""What the baselines share: where a forward may be cut, what a cut leaves behind, and the trial of such plans.

Definitions (the *forward* is ``ops[:boundary]``, the *backward* the rest):
1. A *separator* is a forward op across which nothing is read in the forward but one of its own outputs: every
   buffer that was made up to it and is read by a later forward op is that output. On a chain every op is one.
2. An *articulation point* is a forward op whose removal leaves its component of the undirected graph of forward
   ops (an edge from producer to reader) in more than one piece (Hopcroft & Tarjan, Communications of the ACM
   16(6), 1973). Inside a chain every op is one; where branches run in parallel without a common end, some
   are no separators.
3. A *segment* is a number given to the forward's ops; its buffers, except those that are kept, are *dropped*: held
   from their production to their last read in the forward, made again in the stage where the backward first reads
   one of them, and held from there to their last read. Buffers made in the backward are held to their last read.
4. The reruns are the fewest that serve what is held (``reruns_from_kept``): whatever else a rerun needs is made for it
   alone.

A baseline only says what is held. It never looks at the peak until the interval state has measured it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ebbtide.planners.base import Answer, Problem
from ebbtide.planners.search.greedy import Incumbent, checked
from ebbtide.planners.search.reruns_from_kept import Residents, reruns_for_residents
from ebbtide.step.program import Program

__all__ = [
    "Rank",
    "Trials",
    "again_when_needed",
    "articulation_points",
    "last_forward_reads",
    "residents_of_segments",
    "residents_since",
    "segments_between",
    "separators",
]

Rank = tuple[bool, float]


class Trials:
    """Plans of one problem, measured one by one; the cheapest that fits is the answer.

    Args:
        problem: what is asked.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._found = Incumbent(problem)
        self._setting = ""

    def measure(self, setting: str, residents: Residents) -> Rank:
        """Measure the plan for residents and keep it if it fits and is the cheapest.

        Args:
            setting: what the baseline was set to, for the plan's provenance.
            residents: what is held, per stage.

        Returns:
            Whether it is over the budget, and its overhead or, if it is over, its peak: the least rank is the best.
        """
        found, state = self._found, self._found.state
        state.load(reruns_for_residents(self.problem.program, residents))
        before = found.overhead
        fits = found.offer()
        if found.overhead < before:
            self._setting = setting
        found.tell(setting)
        return (False, state.overhead) if fits else (True, float(state.peak_bytes))

    def answer(self) -> Answer:
        """The cheapest that fits, held against simulator and legality."""
        return checked(self.problem, self._found, {"setting": self._setting} if self._setting else {})


def separators(program: Program) -> list[int]:
    """The separators of the forward, ascending (definition 1)."""
    last = last_forward_reads(program)
    found: list[int] = []
    crossing: set[int] = set()
    for index, op in enumerate(program.ops[: program.boundary]):
        crossing = {b for b in crossing if last[b] > index}
        older = bool(crossing)
        crossing.update(b for b in op.outputs if last[b] > index)
        if not older and len(crossing) <= 1:
            found.append(index)
    return found


def articulation_points(program: Program) -> list[int]:
    """The articulation points of the forward, ascending (definition 2)."""
    count = program.boundary
    near: list[list[int]] = [[] for _ in range(count)]
    for index, op in enumerate(program.ops[:count]):
        for producer in {program.buffers[b].producer for b in op.inputs}:
            if producer is not None:
                near[index].append(producer)
                near[producer].append(index)
    entered = [-1] * count
    low = [0] * count
    found: set[int] = set()
    clock = 0
    for root in range(count):
        if entered[root] >= 0:
            continue
        children = 0
        entered[root] = low[root] = clock
        clock += 1
        path = [(root, iter(near[root]))]
        while path:
            here, rest = path[-1]
            parent = path[-2][0] if len(path) > 1 else -1
            for other in rest:
                if entered[other] < 0:
                    entered[other] = low[other] = clock
                    clock += 1
                    path.append((other, iter(near[other])))
                    break
                if other != parent:
                    low[here] = min(low[here], entered[other])
            else:
                path.pop()
                children += parent == root
                if parent >= 0:
                    low[parent] = min(low[parent], low[here])
                    if parent != root and low[here] >= entered[parent]:
                        found.add(parent)
        if children > 1:
            found.add(root)
    return sorted(found)


def last_forward_reads(program: Program) -> list[int]:
    """Per buffer, the last forward op that reads it, or -1."""
    return [max((r for r in readers if r < program.boundary), default=-1) for readers in program.readers]


def segments_between(program: Program, checkpoints: Collection[int]) -> list[int]:
    """The segment of every forward op, cut after each checkpoint.

    Args:
        program: any.
        checkpoints: forward ops.

    Returns:
        Numbers from 0 on, -1 for checkpoints and for what comes after the last one: its reruns would begin where
        it ends, so that dropping it gains nothing. The forward's last op is therefore no checkpoint.
    """
    cuts = frozenset(checkpoints) - {program.boundary - 1}
    last = max(cuts, default=-1)
    segment: list[int] = []
    number = 0
    for op in range(program.boundary):
        segment.append(number if op < last and op not in cuts else -1)
        number += op in cuts
    return segment


def residents_of_segments(program: Program, segment: Sequence[int], kept: Collection[int] = ()) -> Residents:
    """What is held when segments are dropped (definition 3).

    Args:
        program: any.
        segment: of every forward op; -1 where everything is kept.
        kept: buffers that are kept although their op has a segment.
    """
    dropped: dict[int, list[int]] = {}
    for op, number in enumerate(segment):
        if number >= 0:
            dropped.setdefault(number, []).extend(b for b in program.ops[op].outputs if b not in kept)
    since = [0] * len(program.buffers)
    for buffers in dropped.values():
        reads = (r for b in buffers for r in program.readers[b] if r >= program.boundary)
        again = min(reads, default=len(program.ops)) + 1
        for b in buffers:
            since[b] = again
    return residents_since(program, since)


def residents_since(program: Program, since: Sequence[int]) -> Residents:
    """What is held: every buffer up to its last read in the forward, and again from a stage on.

    Args:
        program: any.
        since: per buffer, that stage; 0 for what is never dropped.
    """
    born = np.array([len(program.ops) if b.producer is None else b.producer for b in program.buffers])
    again = np.array(since)
    dropped = np.array(last_forward_reads(program))
    last = np.array(_last_uses(program))

    def residents(t: int) -> list[int]:
        held = (born < t) & (t <= last) & ((again <= t) | (t <= dropped))
        return np.flatnonzero(held).tolist()

    return residents


def again_when_needed(program: Program, saved: Collection[int]) -> Residents:
    """What is held when some of the forward's buffers are saved: others from where they are first needed again.

    An op that is made again runs once in the backward, where it is first needed, and its buffers are held from there
    to their last read.

    Args:
        program: any.
        saved: buffers of the forward; forward outputs are held besides.
    """
    late = len(program.ops) + 1
    since = [0] * len(program.buffers)
    for op in program.ops[: program.boundary]:
        for b in op.outputs:
            since[b] = 0 if b in saved or b in program.pinned else late
    for t in range(program.boundary, len(program.ops)):
        needed = list(program.ops[t].inputs)
        while needed:
            b = needed.pop()
            producer = program.buffers[b].producer
            if producer is None or since[b] <= t + 1:
                continue
            for made in program.ops[producer].outputs:
                since[made] = min(since[made], t + 1)
            needed.extend(program.ops[producer].inputs)
    return residents_since(program, since)


def _last_uses(program: Program) -> list[int]:
    """Per buffer, the last op that reads it or what may be made of it in the forward: later no rerun needs it."""
    last = [max(readers, default=-1) for readers in program.readers]
    for op in reversed(program.ops[: program.boundary]):
        for b in op.outputs:
            behind = (o for r in program.readers[b] if r < program.boundary for o in program.ops[r].outputs)
            last[b] = max(last[b], max((last[o] for o in behind), default=-1))
    return last
