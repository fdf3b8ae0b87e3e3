"""The unplanned step: captured order, every buffer freed at its last use. The baseline of all overheads."""

from __future__ import annotations

from ebbflow.planners.base import PROGRAM_ORDER, Answer, Problem, Status, planner
from ebbflow.program import Program
from ebbflow.schedule import Schedule
from ebbflow.simulate import simulate

__all__ = ["keep_all", "unplanned_schedule"]


def unplanned_schedule(program: Program) -> Schedule:
    """The captured step in captured order with every buffer freed at its last use."""
    order: list[int | None] = list(range(len(program.ops)))
    order.insert(program.boundary, None)
    return Schedule.from_computes(program, order)


@planner("keep_all")
def keep_all(problem: Problem) -> Answer:
    """The unplanned schedule if it fits, which is then optimal: nothing runs twice."""
    schedule = unplanned_schedule(problem.program)
    if simulate(problem.program, schedule).above_bytes > problem.above_budget_bytes:
        return Answer(Status.INFEASIBLE, None)
    return Answer(Status.OPTIMAL, schedule, bound=0.0, bound_class=PROGRAM_ORDER)
