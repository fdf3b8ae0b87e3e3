"""Known plans fitted to another program of the same structure, instead of a search.

1. Each start point (the unplanned step, the known schedules, the cut relaxation's solution) is repaired to the budget
   and relieved of the reruns that this program does not need: milliseconds.
2. The best is annealed with a tenth of a search's effort, in two turns, unless it is good enough before.
3. Good enough is proven, on this program: the overhead is within ``most_gap`` of a bound. What is not is searched for.

The bound is the linear relaxation of one cut (``cut_bound.quick_bound``), tens of milliseconds. It was 0.0 to 0.2
points of overhead below the whole first cut on transformers of 400 and 1,300 ops (docs/adr/0010).
"""

from __future__ import annotations

from dataclasses import replace

from ebbtide.planners.auto import FULL_EFFORT_OPS
from ebbtide.planners.base import PROGRAM_ORDER, Answer, Problem, Status
from ebbtide.planners.bounds.cut_bound import quick_bound
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.search.greedy import Incumbent, checked, seeds_of, start_from

__all__ = ["adapted_to", "gap_of"]

EFFORT_SHARE = 10  # a search has this many times the effort
TURNS = (4, 1)  # one part in so many of that effort is annealed in each turn


def adapted_to(problem: Problem, most_gap: float, more: float = 0.0) -> tuple[Answer | None, float]:
    """The best of ``problem.seeds`` fitted to its program and budget; ``None`` if that is not good enough.

    Args:
        problem: its seeds are schedules of programs of the same structure.
        most_gap: the overhead above the bound proven here that is to be reached, as a fraction of the unplanned step.
        more: what it may be above that where it is not reached.

    Returns:
        The plan, and its overhead above the bound.
    """
    if (kept := keep_all(problem)).status is Status.OPTIMAL:
        return kept, 0.0
    problem = replace(problem, effort=max(problem.effort // EFFORT_SHARE, 1))
    found = Incumbent(problem)
    quick = quick_bound(problem.program, problem.above_budget_bytes, problem.interrupt, found.state)
    if quick.infeasible:
        return None, 0.0
    found.bound = quick.bound
    for reruns in ([], *seeds_of(problem), quick.reruns or []):
        start_from(found, reruns)
    moves = round(problem.effort * min(1.0, FULL_EFFORT_OPS / len(problem.program.ops)))
    for turn, part in enumerate(TURNS):
        if found.overhead - quick.bound > most_gap:
            found.anneal(moves // part, problem.seed + turn)
    gap = found.overhead - quick.bound
    if found.reruns is None or gap > most_gap + more or problem.interrupt:
        return None, gap
    return checked(problem, found, {"moves": str(moves)}, PROGRAM_ORDER), gap


def gap_of(problem: Problem, overhead: float) -> float:
    """The distance of a plan's overhead to the quick bound: how far from it a good plan of this structure may be."""
    state = Incumbent(problem).state
    return max(overhead - quick_bound(problem.program, problem.above_budget_bytes, problem.interrupt, state).bound, 0.0)
