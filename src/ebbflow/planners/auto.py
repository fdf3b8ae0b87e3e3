"""The default portfolio: a bound and a seed from the cut relaxation, greedy from several starts, local search.

1. The unplanned step, if it fits: nothing is cheaper.
2. Greedy from the unplanned step and from seeds: wins where recomputation chains make new peaks.
3. The cut relaxation (``cut_bound``), cut by cut: a proven bound, and a start point each time, which wins where few
   peaks explain the problem.
4. Where greedy fails or the budget is deep, the budget is descended to in steps as well. Where that fails too,
   the smallest schedule is tried: a budget that it fits is never called infeasible.
5. Annealing from the best, in rounds; they end once the bound is near.

A move costs time in proportion to the ops, so on large programs fewer are made: effort buys about the same time.
"""

from __future__ import annotations

from ebbflow.planners.base import DEFAULT_EFFORT, Answer, Problem, Status, planner
from ebbflow.planners.cut_bound import WORK, CutBound, cut_bounds
from ebbflow.planners.greedy import PROVEN, Found, checked, seeds_of, start_from
from ebbflow.planners.interval_state import reruns_of
from ebbflow.planners.keep_all import keep_all
from ebbflow.planners.smallest import smallest_schedule

__all__ = ["BOUND_CLASS", "auto"]

BOUND_CLASS = "order: program, tiers: none"
FULL_EFFORT_OPS = 750  # up to this many ops each unit of effort is a move; beyond, in inverse proportion
ROUNDS = 4  # of annealing, each from the best: reheating finds more than one slow cooling does
CLOSE = 1e-3  # gap at which rounds end
GAIN, NEAR = 0.02, 0.05  # a round that closes less of the gap is the last, where the gap is that share of the overhead
DEEP_OVERHEAD = 0.25  # beyond this the descent is tried too: recomputation chains then make the peaks


@planner("auto")
def auto(problem: Problem) -> Answer:
    """The best of several starts, improved within the effort, with a proven bound."""
    if (kept := keep_all(problem)).status is Status.OPTIMAL:
        return kept
    found = Found(problem)
    found.tell("greedy")
    for reruns in ([], *seeds_of(problem)):
        start_from(found, reruns)
    cut = _cuts(found)
    effort = round(problem.effort * min(1.0, FULL_EFFORT_OPS / len(problem.program.ops)))
    deep = found.reruns is None or found.overhead - cut.bound > DEEP_OVERHEAD
    if deep and not problem.interrupt:
        found.descend(effort // 2, problem.seed)
    if found.reruns is None and not cut.infeasible and not problem.interrupt:
        _, smallest = smallest_schedule(problem.program, problem.effort, problem.interrupt)
        start_from(found, reruns_of(problem.program, smallest) or [])
    for turn in range(ROUNDS):
        before = found.overhead - cut.bound
        found.anneal(effort // ROUNDS, problem.seed + turn)
        gap = found.overhead - cut.bound
        if gap <= CLOSE or (gap <= NEAR * found.overhead and gap > (1.0 - GAIN) * before):
            break
    notes = {"moves": str(effort), "cuts": str(cut.cuts)}
    return checked(problem, found, notes, BOUND_CLASS)


def _cuts(found: Found) -> CutBound:
    """Bounds and start points of the cut relaxation, until one is proven optimal or the work is done."""
    problem = found.problem
    found.tell("cut relaxation")
    cut = CutBound(0.0, False, 0)
    work = WORK * problem.effort // DEFAULT_EFFORT
    rounds = cut_bounds(
        problem.program,
        problem.above_budget_bytes,
        problem.interrupt,
        state=found.state,
        work=work,
        enough=lambda: found.overhead - PROVEN,
    )
    for cut in rounds:
        found.bound = cut.bound
        if cut.reruns is not None:
            start_from(found, cut.reruns)
        found.tell("cut relaxation")
    found.bound = cut.bound
    return cut
