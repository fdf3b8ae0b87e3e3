"""The least peak for which a schedule is found where buffers may be moved: from what reruns reach, down with loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ebbtide.planners.base import Interrupt
from ebbtide.planners.hybrid.choice import Choice, choice_of
from ebbtide.planners.hybrid.floor import floor_with_tiers
from ebbtide.planners.hybrid.state import HybridState
from ebbtide.planners.search import local_search
from ebbtide.planners.search.local_search import DESCENT
from ebbtide.step.machine import Link
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate

__all__ = ["smallest_with_tiers"]

RUNS_PER_MOVE = 1000
ENOUGH = 1.015  # times the floor, as in search.smallest


def smallest_with_tiers(
    program: Program,
    links: Mapping[str, Link],
    start: Schedule,
    effort: int,
    interrupt: Interrupt,
    tell: Callable[[int], None],
) -> tuple[int, Schedule]:
    """A schedule with a peak as low as is found, or within 1.5 % of the floor, whatever its time.

    Args:
        program: with costs.
        links: to the tiers that buffers may be moved to.
        start: the schedule of least memory that moves nothing.
        effort: moves in all.
        interrupt: when to stop with what was reached.
        tell: called with the bytes above the step's start that each step down reaches.

    Returns:
        Bytes above the step's start, and the schedule.
    """
    floor, _ = floor_with_tiers(program, links)
    state = HybridState(program, links)
    found: list[tuple[int, Choice]] = []
    for choice in (choice_of(program, start), Choice()):
        if choice is not None and (not found or min(found, key=lambda each: each[0])[0] > ENOUGH * floor):
            state.load_choice(choice)
            state.allow_work(effort * RUNS_PER_MOVE)
            _descend(state, int(ENOUGH * floor), interrupt, tell)
            found.append((state.peak_bytes, state.choice))
    state.load_choice(min(found, key=lambda each: each[0])[1])
    schedules = [(simulate(program, start).above_bytes, 0, start), (state.peak_bytes, 1, state.to_schedule())]
    above, _, schedule = min(schedules, key=lambda each: each[:2])
    return above, schedule


def _descend(state: HybridState, target: int, interrupt: Interrupt, tell: Callable[[int], None]) -> None:
    """Lower the peak step by step, as far as repairing works."""
    level = 0
    while state.peak_bytes > target and not interrupt and not state.exhausted and level < len(DESCENT):
        goal = max(target, int(state.peak_bytes * (1.0 - DESCENT[level])))
        before = state.choice
        if any(_reached(state, before, goal, interrupt, lane) for lane in (0.0, 0.5)):
            level = max(level - 1, 0)
            tell(state.peak_bytes)
        else:
            state.load_choice(before)
            level += 1


def _reached(state: HybridState, before: Choice, goal: int, interrupt: Interrupt, lane: float) -> bool:
    state.load_choice(before)
    return local_search.repair(state, goal, interrupt, lane=lane)
