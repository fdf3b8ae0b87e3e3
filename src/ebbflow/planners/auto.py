"""The default portfolio: a bound and a seed from the cut relaxation, greedy from several starts, local search.

1. The unplanned step, if it fits: nothing is cheaper.
2. The cut relaxation (``cut_bound``): a proven bound, and the start point that wins where one peak explains the
   problem. Greedy from the unplanned step wins where recomputation chains make new peaks. Both are run.
3. Annealing from the best; it ends early once the bound is met.
4. Where greedy fails or the budget is deep, the budget is descended to in steps as well.
"""

from __future__ import annotations

from ebbflow.planners.base import Answer, Problem, Status, planner
from ebbflow.planners.cut_bound import cut_bound
from ebbflow.planners.greedy import Found, checked, seeds_of, start_from
from ebbflow.planners.keep_all import keep_all

__all__ = ["BOUND_CLASS", "auto"]

BOUND_CLASS = "order: program, tiers: none"
DEEP_OVERHEAD = 0.25  # beyond this the descent is tried too: recomputation chains then make the peaks


@planner("auto")
def auto(problem: Problem) -> Answer:
    """The best of all cheap planners, improved within the effort, with a proven bound."""
    if (kept := keep_all(problem)).status is Status.OPTIMAL:
        return kept
    found = Found(problem)
    found.tell("greedy")
    for reruns in ([], *seeds_of(problem)):
        start_from(found, reruns)
    found.tell("cut relaxation")
    cut = cut_bound(problem.program, problem.above_budget_bytes, problem.interrupt, state=found.state)
    found.bound = cut.bound
    for reruns in cut.seeds:
        start_from(found, reruns)
    deep = found.reruns is None or found.overhead - cut.bound > DEEP_OVERHEAD
    if deep and not problem.interrupt:
        found.descend(problem.effort // 2, problem.seed)
    rounds = 2
    for turn in range(rounds):
        found.anneal(problem.effort // rounds, problem.seed + turn)
    notes = {"moves": str(problem.effort), "cuts": str(cut.cuts)}
    return checked(problem, found, notes, BOUND_CLASS)
