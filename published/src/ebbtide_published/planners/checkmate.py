"""Checkmate's optimal rematerialization as a mixed-integer program, solved by HiGHS.

Source: Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020, §4. The
model is ``stage_model``. What differs from the paper: buffers are held, not ops (an op may have several outputs);
inputs live while an op allocates, and its workspace counts; FREE is continuous; the solver begins with the best plan
that the heuristics find, so that it never answers with less. It proves about 70 ops in a minute; beyond some hundred
it is an oracle no longer, and its time limit gives the start plan with whatever bound was reached.
"""

from __future__ import annotations

from ebbtide.planners.base import PROGRAM_ORDER, Answer, Problem, Progress, Status
from ebbtide.planners.bounds.stage_model import PERCENT, StageModel
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.registry import planner
from ebbtide.planners.search.greedy import PROVEN, Incumbent, checked, seeds_of, start_from
from ebbtide.planners.solvers.highs import Solved, solve

__all__ = ["BOUND_CLASS", "SECONDS", "checkmate", "checkmate_free", "heuristic_start"]

BOUND_CLASS = f"{PROGRAM_ORDER}, reruns: once a stage, ascending"
SECONDS = 600.0  # where no time limit is given
HEURISTIC_EFFORT = 2_000
GAP = 1e-6  # relative, at which the solver stops; its default is 1e-4
SAFETY = 1e-6  # taken off the bound, in percent: HiGHS' own feasibility and optimality tolerance is 1e-7


@planner("checkmate")
def checkmate(problem: Problem) -> Answer:
    """The optimum of the stage model in its gap form."""
    return _solved(problem, "gap")


@planner("checkmate_free")
def checkmate_free(problem: Problem) -> Answer:
    """The optimum of the stage model with the paper's FREE columns: the same plan, proven more slowly."""
    return _solved(problem, "free")


def heuristic_start(problem: Problem) -> Incumbent:
    """The best plan of seeds, greedy and a short local search; none if that is all too little."""
    found = Incumbent(problem)
    found.tell("heuristic start")
    for reruns in ([], *seeds_of(problem)):
        start_from(found, reruns)
    moves = min(problem.effort, HEURISTIC_EFFORT)
    if found.reruns is None:
        found.descend(moves, problem.seed)
    found.anneal(moves, problem.seed)
    return found


def _solved(problem: Problem, form: str) -> Answer:
    if (kept := keep_all(problem)).status is Status.OPTIMAL:
        return kept
    found = heuristic_start(problem)
    either = problem.interrupt.or_after(SECONDS)
    stages = StageModel(problem.program, problem.above_budget_bytes, form, interrupt=either)
    if stages.hopeless:
        return Answer(
            Status.INFEASIBLE, None, bound_class=BOUND_CLASS, notes={"solver": "not needed: an op is too big"}
        )
    if stages.unfinished:
        solved = Solved(f"not begun: {stages.unfinished}", False, False, float("-inf"), None)
        return _answer(problem, found, stages, solved, cut_short=True)

    def tell(best: float, bound: float) -> None:
        problem.progress(Progress("branch and bound", _overhead(best), _overhead(bound)))

    solved = solve(
        stages.model,
        either,
        start=stages.start(found.reruns) if found.reruns is not None else None,
        options={"mip_rel_gap": GAP},
        tell=tell,
    )
    return _answer(problem, found, stages, solved, cut_short=bool(either))


def _overhead(percent: float) -> float | None:
    return percent / PERCENT if abs(percent) < 1e15 else None


def _answer(problem: Problem, found: Incumbent, stages: StageModel, solved: Solved, *, cut_short: bool) -> Answer:
    """The better of the solver's plan and the start, after the simulator has agreed to it."""
    notes = {"solver": f"HiGHS: {solved.status}", "rows": str(stages.model.rows)}
    notes["columns"] = str(len(stages.model.cost))
    if solved.infeasible and found.reruns is None:
        return Answer(Status.INFEASIBLE, None, bound_class=BOUND_CLASS, notes=notes)
    if solved.values is not None:
        found.state.load(stages.reruns(solved.values))
        found.offer()
    found.bound = max(solved.bound - SAFETY, 0.0) / PERCENT if solved.bound > -1e15 else None
    answer = checked(problem, found, notes, BOUND_CLASS)
    if answer.schedule is not None and answer.status is not Status.OPTIMAL:
        gap = found.overhead - (found.bound or 0.0)
        if solved.optimal and gap <= PROVEN + 2 * GAP * found.overhead + 2 * SAFETY / PERCENT:
            return Answer(Status.OPTIMAL, answer.schedule, found.bound, BOUND_CLASS, notes)
        if cut_short:
            return Answer(Status.TIME_LIMIT, answer.schedule, found.bound, BOUND_CLASS, notes)
    if answer.schedule is None and cut_short:
        return Answer(Status.TIME_LIMIT, None, found.bound, BOUND_CLASS, notes)
    return answer
