"""Checkmate's approximation (MLSys 2020, §5): relax the model, round what is held, recompute what is missing.

1. *Relax* the stage model at ``1 - margin`` of the budget (§5.3: rounding may need more bytes than the relaxation;
   Appendix D finds the paper's fixed 0.1 too careful, so margins are searched).
2. *Round* ``held`` alone at a threshold (§5.2: deterministic rounding of S; thresholds are swept, as the authors'
   code does), and take the fewest reruns that serve it (``search.reruns_from_kept``).
3. *Judge* by the simulator at the full budget. A rounded plan that fits is *pure*. One that does not is repaired by
   evictions, and every plan is cleaned up: *repaired*. Both overheads are in the plan's notes, and the better plan
   is returned; the pure one alone by ``checkmate_lp_pure``.

The relaxation at the full budget is a lower bound of the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ebbtide.planners.base import Answer, Interrupt, Problem, Progress, Status
from ebbtide.planners.bounds.stage_model import PERCENT, StageModel
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.registry import planner
from ebbtide.planners.search import local_search
from ebbtide.planners.search.greedy import Incumbent, Reruns, checked
from ebbtide.planners.search.reruns_from_kept import reruns_for_residents
from ebbtide.planners.solvers.highs import solve
from ebbtide_published.planners.checkmate import BOUND_CLASS, SAFETY, SECONDS

__all__ = ["checkmate_lp", "checkmate_lp_pure"]

MARGINS = (0.0, 0.02, 0.05, 0.1, 0.2)
THRESHOLDS = tuple(k / 10 for k in range(1, 10))


@planner("checkmate_lp")
def checkmate_lp(problem: Problem) -> Answer:
    """Two-phase rounding, repaired to the budget."""
    return _rounded(problem, repaired=True)


@planner("checkmate_lp_pure")
def checkmate_lp_pure(problem: Problem) -> Answer:
    """Two-phase rounding as published: no plan where no rounding fits the budget."""
    return _rounded(problem, repaired=False)


def _rounded(problem: Problem, *, repaired: bool) -> Answer:
    if (kept := keep_all(problem)).status is Status.OPTIMAL:
        return kept
    found = {kind: Incumbent(problem) for kind in ("pure", "repaired")}
    interrupt = problem.interrupt.or_after(SECONDS)
    status, unfinished = "no relaxation was solved", False
    for margin in MARGINS:
        if interrupt or (margin and found["pure"].bound is None):
            break
        budget = int((1.0 - margin) * problem.above_budget_bytes)
        problem.progress(Progress(f"relaxation at {1.0 - margin:.0%} of the budget", _best(found), found["pure"].bound))
        stages = StageModel(problem.program, budget, interrupt=interrupt)
        if stages.unfinished:
            status, unfinished = f"not begun: {stages.unfinished}", True
        if stages.hopeless or stages.unfinished:
            break
        values, bound, status = _relaxed(stages, interrupt)
        if margin == 0.0:
            for each in found.values():
                each.bound = bound
        if values is None:
            break
        for reruns in _roundings(stages, values):
            _offer(found, reruns)
    notes = {"solver": f"HiGHS: {status}"}
    for kind, each in found.items():
        notes[f"{kind} overhead"] = f"{each.overhead:.6f}" if each.reruns is not None else "none within the budget"
    best = found["repaired"] if repaired else found["pure"]
    if repaired and found["pure"].overhead < best.overhead:
        best = found["pure"]
    answer = checked(problem, best, notes, BOUND_CLASS if best.bound is not None else "")
    if (interrupt or unfinished) and answer.status in (Status.FEASIBLE, Status.INFEASIBLE):
        return Answer(Status.TIME_LIMIT, answer.schedule, answer.bound, answer.bound_class, notes)
    return answer


def _best(found: dict[str, Incumbent]) -> float | None:
    overhead = min(each.overhead for each in found.values())
    return overhead if overhead < float("inf") else None


def _relaxed(stages: StageModel, interrupt: Interrupt) -> tuple[NDArray[np.float64] | None, float | None, str]:
    """Values, bound and status of the relaxation."""
    solved = solve(stages.model, interrupt, relaxed=True)
    if not solved.optimal:
        return None, None, solved.status
    return solved.values, max(solved.bound - SAFETY, 0.0) / PERCENT, solved.status


def _roundings(stages: StageModel, values: NDArray[np.float64]) -> Iterator[Reruns]:
    """The reruns of every threshold."""
    for threshold in THRESHOLDS:
        held: dict[int, list[int]] = defaultdict(list)
        for (t, b), column in stages.held.items():
            if values[column] > threshold:
                held[t].append(b)
        yield reruns_for_residents(stages.program, lambda t, held=held: held[t])


def _offer(found: dict[str, Incumbent], reruns: Reruns) -> None:
    """Judge one rounding as it is, and after repair and clean-up."""
    pure, repaired = found["pure"], found["repaired"]
    pure.state.load(reruns)
    pure.offer()
    budget, interrupt = pure.problem.above_budget_bytes, pure.problem.interrupt
    repaired.state.load(reruns)
    repaired.begin_phase()
    if repaired.state.peak_bytes > budget:
        local_search.repair(repaired.state, budget, interrupt)
    if repaired.state.peak_bytes <= budget:
        local_search.clean_up(repaired.state, budget)
        repaired.offer()
