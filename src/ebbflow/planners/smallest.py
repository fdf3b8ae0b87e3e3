"""The least peak for which a schedule is found: descend from the unplanned step as far as repairing works."""

from __future__ import annotations

from ebbflow.planners import local_search
from ebbflow.planners.base import Interrupt
from ebbflow.planners.floor import floor_bytes
from ebbflow.planners.interval_state import IntervalState
from ebbflow.program import Program
from ebbflow.schedule import Schedule
from ebbflow.simulate import simulate

__all__ = ["smallest_schedule"]

ENOUGH = 1.015  # times the floor: the last percent takes most of the time, and is needed by nobody


def smallest_schedule(
    program: Program, effort: int = 20_000, interrupt: Interrupt | None = None
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
    local_search.descend(state, int(ENOUGH * floor), 0, interrupt or Interrupt(), moves=effort)
    schedule = state.to_schedule()
    return simulate(program, schedule).above_bytes, schedule
