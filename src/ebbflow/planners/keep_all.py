"""The unplanned step: captured order, every buffer freed at its last use. The baseline of all overheads."""

from __future__ import annotations

from ebbflow.planners.base import PROGRAM_ORDER, Answer, Problem, Status, planner
from ebbflow.program import Program, analysis
from ebbflow.schedule import Schedule
from ebbflow.simulate import simulate

__all__ = ["keep_all", "unplanned_bytes", "unplanned_schedule"]


@analysis
def unplanned_schedule(program: Program) -> Schedule:
    """The captured step in captured order with every buffer freed at its last use."""
    order: list[int | None] = list(range(len(program.ops)))
    order.insert(program.boundary, None)
    return Schedule.from_computes(program, order)


@analysis
def unplanned_bytes(program: Program) -> int:
    """The peak of the unplanned step, bytes above its start."""
    return simulate(program, unplanned_schedule(program)).above_bytes


@planner("keep_all")
def keep_all(problem: Problem) -> Answer:
    """The unplanned schedule if it fits, which is then optimal: nothing runs twice."""
    if unplanned_bytes(problem.program) > problem.above_budget_bytes:
        return Answer(Status.INFEASIBLE, None)
    return Answer(Status.OPTIMAL, unplanned_schedule(problem.program), bound=0.0, bound_class=PROGRAM_ORDER)
