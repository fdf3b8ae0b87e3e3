"""Start points from coarsenings of a program: its layers planned as single ops, and the plan brought down.

A coarse op reruns a layer or a part of it at once, so a search covers in the same time what takes many moves op by op:
which layers are rerun from where. What a layer could drop or hold inside is left to the search below. There is one
for each depth of module names that leaves between a fourth and two thirds of the ops (``coarsen.by_layer``); a program
without names has none. No bound is carried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ebbtide.planners.base import Problem, silent
from ebbtide.planners.reductions.coarsen import Coarse, by_layer, layers
from ebbtide.planners.search.greedy import Reruns, greedy
from ebbtide.planners.search.interval_state import reruns_of

__all__ = ["coarse_starts", "coarsenings"]

FEWEST, MOST = 0.25, 0.67  # ops of a coarsening, as a share of the program's
STEP = 1.4  # each has at least so many times the ops of the one before
DEEPEST = 16  # names


def coarsenings(problem: Problem) -> list[Coarse]:
    """Coarser programs, the coarsest first."""
    program = problem.program
    found: list[Coarse] = []
    least = FEWEST * len(program.ops)
    for depth in (*range(1, DEEPEST), None):
        coarse = by_layer(program, layers(program, depth))
        count = len(coarse.program.ops)
        if count > MOST * len(program.ops):
            break
        if count >= least:
            found.append(coarse)
            least = STEP * count
    return found


def coarse_starts(problem: Problem, effort: int) -> Iterator[Reruns]:
    """Reruns of the program, one set for each coarsening for which a plan is found.

    Args:
        problem: what is asked.
        effort: annealing moves for each.
    """
    for coarse in coarsenings(problem):
        if problem.interrupt:
            return
        reduced = coarse.reduce(replace(problem, effort=effort, progress=silent))
        schedule = greedy(reduced.problem).schedule
        if schedule is not None:
            reruns = reruns_of(problem.program, reduced.lift(schedule))
            if reruns is not None:
                yield reruns
