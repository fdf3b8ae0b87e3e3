"""The stage model of a small program, solved from the best plan known: what local search does not find there, it does.

Local search has moves for what pays on large programs. On programs of some thirty ops a plan may be several moves away
in one step, and the whole model (``stage_model``) is small enough for a solver to take that step. Of a large program
the model is out of reach, and so are its windows: every op before a window may be rerun in each of its stages.

Only plans are taken from it, no bound: the model's class has fewer schedules (each op once a stage, in ascending
order) than the one that bounds of the portfolio hold for.
"""

from __future__ import annotations

from ebbtide.planners.bounds.stage_model import StageModel
from ebbtide.planners.search.greedy import Incumbent, start_from
from ebbtide.planners.solvers.highs import solve

__all__ = ["start_from_model"]

OPS, ROWS = 60, 3_500  # of the largest model: beyond, the root relaxation takes seconds
LEAST_ROWS = 3_000  # smaller models take as long each time the solver asks
GAP = 1e-5  # relative, at which the solver stops


def start_from_model(incumbent: Incumbent, work: int) -> None:
    """Solve the stage model within ``work`` (units as in ``cut_bound``), and start from its solution.

    Nothing is done for programs that are too large.
    """
    problem = incumbent.problem
    if len(problem.program.ops) > OPS or work <= 0:
        return
    incumbent.tell("exact model")
    stages = StageModel(problem.program, problem.above_budget_bytes, interrupt=problem.interrupt)
    rows = stages.model.rows
    if stages.hopeless or stages.unfinished or rows > ROWS:
        return
    solved = solve(
        stages.model,
        problem.interrupt,
        start=None if incumbent.reruns is None else stages.start(incumbent.reruns),
        options={"mip_rel_gap": GAP},
        most_checks=work // max(rows, LEAST_ROWS),
    )
    if solved.values is not None:
        start_from(incumbent, stages.reruns(solved.values))
