"""The least peak for which a schedule is found: descend from the unplanned step as far as repairing works."""

from __future__ import annotations

from ebbflow.planners import local_search
from ebbflow.planners.base import DEFAULT_EFFORT, Answer, Interrupt, Problem, Status, planner
from ebbflow.planners.floor import floor_bytes
from ebbflow.planners.interval_state import IntervalState
from ebbflow.program import Program
from ebbflow.schedule import Schedule
from ebbflow.simulate import simulate

__all__ = ["least_memory", "smallest_schedule"]

RUNS_PER_MOVE = 3000  # walked per unit of effort: about 10 s for the default effort, on the worst programs
ENOUGH = 1.015  # times the floor: the last percent takes most of the time, and is needed by nobody


def smallest_schedule(
    program: Program, effort: int = DEFAULT_EFFORT, interrupt: Interrupt | None = None
) -> tuple[int, Schedule]:
    """A schedule with a peak as low as is found, or within 1.5 % of the floor, whatever its time.

    Args:
        program: with costs.
        effort: local-search moves in all.
        interrupt: when to stop with what was reached.

    Returns:
        Bytes above the step's start, and the schedule.
    """
    state = IntervalState(program)
    floor, _ = floor_bytes(program)
    state.allow_work(effort * RUNS_PER_MOVE)
    local_search.descend(state, int(ENOUGH * floor), 0, interrupt or Interrupt(), moves=effort)
    schedule = state.to_schedule()
    return simulate(program, schedule).above_bytes, schedule


@planner("least_memory")
def least_memory(problem: Problem) -> Answer:
    """The schedule with the least peak that is found, whatever its time."""
    program = problem.program
    peaks = [(simulate(program, seed).above_bytes, index) for index, seed in enumerate(problem.seeds)]
    found, schedule = smallest_schedule(program, problem.effort, problem.interrupt) if not peaks else (0, None)
    if schedule is None:
        found, index = min(peaks)
        schedule = problem.seeds[index]
    if found > problem.above_budget_bytes:
        return Answer(Status.INFEASIBLE, None)
    return Answer(Status.FEASIBLE, schedule)
