"""The unplanned step as a planner."""

from __future__ import annotations

from ebbtide.planners.base import PROGRAM_ORDER, Answer, Problem, Status
from ebbtide.planners.registry import planner
from ebbtide.step.unplanned import unplanned_bytes, unplanned_schedule

__all__ = ["keep_all"]


@planner("keep_all")
def keep_all(problem: Problem) -> Answer:
    """The unplanned schedule if it fits, which is then optimal: nothing runs twice."""
    if unplanned_bytes(problem.program) > problem.above_budget_bytes:
        return Answer(Status.INFEASIBLE, None)
    return Answer(Status.OPTIMAL, unplanned_schedule(problem.program), bound=0.0, bound_class=PROGRAM_ORDER)
