"""One planner on one program and budget, checked and timed."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ebbtide.planners import Answer, Interrupt, Problem, planner_named
from ebbtide.planners.base import DEFAULT_EFFORT
from ebbtide.step import legality
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate

__all__ = ["Planned", "plan_with"]


@dataclass(frozen=True)
class Planned:
    """What a planner gave.

    Attributes:
        overhead: of its plan; ``None`` if it has none.
        peak_bytes: of its plan, by the simulator.
        legal: whether its plan is legal and within the budget, by the independent checker.
        cpu_seconds: of this process; children's are in ``seconds``.
        seconds: wall time.
    """

    answer: Answer
    overhead: float | None
    peak_bytes: int | None
    legal: bool
    cpu_seconds: float
    seconds: float

    @property
    def proven(self) -> bool:
        return self.answer.status.name == "OPTIMAL"


def plan_with(
    name: str,
    program: Program,
    budget: int,
    *,
    limit_seconds: float | None = None,
    effort: int = DEFAULT_EFFORT,
    seeds: tuple[Schedule, ...] = (),
    seed: int = 0,
) -> Planned:
    """The plan of planner ``name``."""
    cpu, wall = time.process_time(), time.perf_counter()
    problem = Problem(program, budget, effort=effort, interrupt=Interrupt(limit_seconds), seeds=seeds, seed=seed)
    answer = planner_named(name)(problem)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    if answer.schedule is None:
        return Planned(answer, None, None, True, cpu, wall)
    timeline = simulate(program, answer.schedule)
    legal = not legality.check(program, answer.schedule, budget)
    return Planned(answer, timeline.seconds / program.seconds - 1.0, timeline.above_bytes, legal, cpu, wall)
