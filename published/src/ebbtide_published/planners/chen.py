"""Sublinear memory cost: checkpoints every so many ops, or every so many bytes (Chen et al. 2016, arXiv 1604.06174).

What lies between two checkpoints is dropped and made again in the backward (``published.segments``, definition 3).
1. *sqrt* (§4.1): of ``m`` candidates every ``floor(sqrt(m))``-th is a checkpoint. One plan, whatever the budget.
2. *greedy* (Algorithm 3): bytes made in the forward are summed up, and the next candidate at which the sum exceeds
   ``b`` is a checkpoint, where the sum begins anew. The size ``b`` is searched.

Candidates come in three kinds, after Checkmate (arXiv 1910.02653 §6.1, Table 1, App. B):
3. ``chen_*``: separators. The paper is about chains, and Checkmate compares with it on chains only. Separators are
   what a general program has of a chain: from one of them on the forward can be made again from a single buffer.
4. ``ap_*``: articulation points of the undirected forward graph.
5. ``linearized_*``: every op of the forward, as if its order made it a chain. A segment may then need buffers of
   earlier ones that are dropped; they are made again for it alone.

Where one buffer is read throughout the forward (an attention mask, rotary tables), kinds 3 and 4 find few
candidates or none, and only kind 5 plans anything. Published implementations set ``b`` by hand or from a
list of sizes; here the list is geometric and is refined around the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ebbtide.planners.base import Answer, Problem, Status
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.registry import planner
from ebbtide.step.program import Program
from ebbtide.units import format_count
from ebbtide_published.planners.segments import (
    Rank,
    Trials,
    articulation_points,
    residents_of_segments,
    segments_between,
    separators,
)

__all__ = [
    "ap_greedy",
    "ap_sqrt",
    "chen_greedy",
    "chen_sqrt",
    "linearized_greedy",
    "linearized_sqrt",
    "sqrt_checkpoints",
]

SIZES = 32  # segment sizes first tried, the largest being all that the forward makes
PART = 4  # the smallest is that, divided by the candidates and by this: below, nearly every candidate is taken
FINER = 5  # sizes tried from the best to each of its neighbours, per round
ROUNDS = 2


@planner("chen_sqrt")
def chen_sqrt(problem: Problem) -> Answer:
    """Every so many separators."""
    return _sqrt(problem, separators(problem.program))


@planner("chen_greedy")
def chen_greedy(problem: Problem) -> Answer:
    """Every so many bytes, at separators."""
    return _greedy(problem, separators(problem.program))


@planner("ap_sqrt")
def ap_sqrt(problem: Problem) -> Answer:
    """Every so many articulation points."""
    return _sqrt(problem, articulation_points(problem.program))


@planner("ap_greedy")
def ap_greedy(problem: Problem) -> Answer:
    """Every so many bytes, at articulation points."""
    return _greedy(problem, articulation_points(problem.program))


@planner("linearized_sqrt")
def linearized_sqrt(problem: Problem) -> Answer:
    """Every so many ops."""
    return _sqrt(problem, range(problem.program.boundary))


@planner("linearized_greedy")
def linearized_greedy(problem: Problem) -> Answer:
    """Every so many bytes, at any op."""
    return _greedy(problem, range(problem.program.boundary))


def sqrt_checkpoints(candidates: Sequence[int]) -> list[int]:
    """Every ``floor(sqrt(m))``-th of ``m`` candidates."""
    every = max(math.isqrt(len(candidates)), 1)
    return list(candidates[every - 1 :: every])


def _sqrt(problem: Problem, candidates: Sequence[int]) -> Answer:
    if (unplanned := keep_all(problem)).status is Status.OPTIMAL:
        return unplanned
    trials = Trials(problem)
    if not problem.interrupt:
        checkpoints = sqrt_checkpoints(candidates)
        segments = segments_between(problem.program, checkpoints)
        trials.measure(format_count(len(checkpoints), "checkpoint"), residents_of_segments(problem.program, segments))
    return trials.answer()


def _greedy(problem: Problem, candidates: Sequence[int]) -> Answer:
    if (unplanned := keep_all(problem)).status is Status.OPTIMAL:
        return unplanned
    search = _SizeSearch(problem, candidates)
    search.run()
    return search.trials.answer()


class _SizeSearch:
    """The search for the segment size of the greedy rule."""

    def __init__(self, problem: Problem, candidates: Sequence[int]) -> None:
        self.problem = problem
        self.trials = Trials(problem)
        self._candidates = frozenset(candidates)
        self._sizes = _made_bytes(problem.program)
        self._rank_of: dict[int, Rank] = {}  # by segment size
        self._known: dict[tuple[int, ...], Rank] = {}  # by checkpoints: many sizes give the same

    def run(self) -> None:
        """Try every candidate, a geometric list of sizes, then finer ones around the best."""
        total = sum(self._sizes)
        self._try_all([0, *_between(total // max(PART * len(self._candidates), 1), total, SIZES)])
        for _ in range(ROUNDS):
            tried = sorted(self._rank_of)
            if not tried:
                return
            best = min(range(len(tried)), key=lambda i: (self._rank_of[tried[i]], tried[i]))
            below, above = tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)]
            self._try_all(_between(below, tried[best], FINER) + _between(tried[best], above, FINER))

    def _try_all(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            if self.problem.interrupt:
                return
            if size not in self._rank_of:
                self._rank_of[size] = self._rank(size)

    def _rank(self, size: int) -> Rank:
        checkpoints = self._checkpoints(size)
        if checkpoints not in self._known:
            segments = segments_between(self.problem.program, checkpoints)
            residents = residents_of_segments(self.problem.program, segments)
            setting = f"segments above {size} bytes, {format_count(len(checkpoints), 'checkpoint')}"
            self._known[checkpoints] = self.trials.measure(setting, residents)
        return self._known[checkpoints]

    def _checkpoints(self, size: int) -> tuple[int, ...]:
        """Algorithm 3."""
        found: list[int] = []
        made = 0
        for op, made_here in enumerate(self._sizes):
            made += made_here
            if made > size and op in self._candidates:
                found.append(op)
                made = 0
        return tuple(found)


def _made_bytes(program: Program) -> list[int]:
    """Bytes that each forward op makes."""
    return [sum(program.buffers[b].bytes for b in op.outputs) for op in program.ops[: program.boundary]]


def _between(low: int, high: int, count: int) -> list[int]:
    """``count`` sizes from ``low`` to ``high``, each end included, in equal ratios."""
    ratio = (high + 1) / (low + 1)  # shifted by one, because the smallest may be 0
    return sorted({round((low + 1) * ratio ** (i / (count - 1))) - 1 for i in range(count)})
