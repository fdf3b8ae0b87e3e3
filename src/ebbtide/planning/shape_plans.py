"""Buckets: input shapes of one model that are served by one searched plan.

Definitions:
1. Shapes whose programs have one *structure* (``planning.cache``, definition 1) can take each other's plans.
2. A *bucket* is a plan that was searched for one of them. Another shape belongs to it if the plan, fitted to that
   shape's own program (``reductions.adapt``), is proven there to be within :data:`WASTE` of what the search reached:
   its overhead exceeds a bound by at most :data:`WASTE` more than the searched plan exceeded the same bound at home.
   Where no bucket is known, what the fitting finds from nothing may be good enough, and makes one. Where a quick plan
   will do, one within :data:`MORE_WASTE` is given out as such; it is no bucket's.
3. A shape that belongs to no bucket is searched for, before it runs, and is the first of a new one.

Nothing is assumed about the shapes of a bucket: what is given out was simulated and checked on the shape's own
program, with what is resident at that call. A step of one shape alone is always searched for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbtide.planners.base import Answer, Problem
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planning.cache import CachedAnswer, share_of, structure_of
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import overhead_of, simulate
from ebbtide.step.unplanned import unplanned_schedule

__all__ = ["WASTE", "Buckets"]

PLANNER = "auto"

WASTE = 0.005
"""Of the unplanned step's time, beyond what the search itself left open."""
MORE_WASTE = 0.03
"""The same of a plan that is made better beside training."""
MOST = 32  # buckets of one model; what was used longest ago goes
NEAREST = 4  # of them are tried, those planned nearest in depth
STILL_SMALL = 1.05  # a least schedule is one still while its peak over the floor is at most so many times that at home


@dataclass(frozen=True)
class _Bucket:
    structure: str
    schedule: Schedule
    depth: float  # the budget as a share of all that the step makes
    left_open: float  # what the search left between overhead and quick bound


class Buckets:
    """What was searched for one fitted model, and what other shapes may take of it."""

    def __init__(self) -> None:
        self._buckets: list[_Bucket] = []  # used last comes last
        self._seen: dict[str, set[str]] = {}  # per structure the fingerprints of two programs at most
        self._least: dict[str, tuple[Schedule, float]] = {}  # per structure: definition in smallest()

    def __len__(self) -> int:
        return len(self._buckets)

    def answer(self, planner: str, problem: Problem, *, quick: bool = False) -> tuple[CachedAnswer, bool] | None:
        """A plan for a shape that was not searched for; ``None`` if it is to be searched for (definitions 2 and 3).

        Args:
            planner: other than the default one, a user wants that planner's plans and no others.
            problem: what is asked.
            quick: whether a quick plan will do.

        Returns:
            The plan, and whether it is as good as a bucket's.
        """
        from ebbtide.planners.reductions.adapt import adapted_to  # with numba: not before something is planned

        program = problem.program
        structure = structure_of(program)
        if planner != PLANNER or not self._seen.get(structure, set[str]()) - {program.fingerprint}:
            return None
        depth = share_of(program, problem.above_budget_bytes)
        alike = [each for each in self._buckets if each.structure == structure]
        near = sorted(alike, key=lambda each: abs(each.depth - depth))[:NEAREST]
        most_gap = WASTE + max((each.left_open for each in near), default=0.0)
        found, gap = adapted_to(
            replace(problem, seeds=tuple(each.schedule for each in near)), most_gap, MORE_WASTE if quick else 0.0
        )
        if found is None or found.schedule is None:
            return None
        if gap > most_gap:
            return CachedAnswer(found, None), False
        if near:
            self._buckets.remove(near[0])
            self._buckets.append(near[0])
        else:
            self.learn(planner, problem, found, None)
        peaks = [simulate(program, each).above_bytes for each in (found.schedule, *self._least_of(structure))]
        return CachedAnswer(found, min(peaks)), True

    def smallest(self, problem: Problem) -> tuple[int, Schedule] | None:
        """A schedule of small peak that is known to fit, bytes above the start first; ``None`` if it is to be found.

        It is the least that was found for a program of this structure, as long as it is about as near to the floor
        here as it was there.
        """
        structure = structure_of(problem.program)
        if structure not in self._least:
            return None
        schedule, over_floor = self._least[structure]
        above = simulate(problem.program, schedule).above_bytes
        near_floor = above <= STILL_SMALL * over_floor * floor_bytes(problem.program)[0]
        return (above, schedule) if near_floor and above <= problem.above_budget_bytes else None

    def learn(self, planner: str, problem: Problem, answer: Answer, smallest: Schedule | None) -> None:
        """Remember what was searched for ``problem``.

        Args:
            planner: whose answer it is.
            problem: what was asked.
            answer: with a schedule.
            smallest: the schedule of least peak that was found beside it, if one was looked for.
        """
        from ebbtide.planners.reductions.adapt import gap_of

        program, schedule = problem.program, answer.schedule
        assert schedule is not None
        structure = structure_of(program)
        self._see(structure, program)
        if smallest is not None:
            self.learn_smallest(program, smallest)
        if planner != PLANNER or schedule == unplanned_schedule(program):
            return
        depth = share_of(program, problem.above_budget_bytes)
        self._buckets.append(_Bucket(structure, schedule, depth, gap_of(problem, overhead_of(program, schedule))))
        del self._buckets[:-MOST]

    def learn_smallest(self, program: Program, smallest: Schedule) -> None:
        """Remember the schedule of least peak that was found for ``program``, if it is the first of its structure."""
        structure = structure_of(program)
        if structure not in self._least:
            floor = max(floor_bytes(program)[0], 1)
            self._least[structure] = (smallest, simulate(program, smallest).above_bytes / floor)

    def _least_of(self, structure: str) -> list[Schedule]:
        return [self._least[structure][0]] if structure in self._least else []

    def _see(self, structure: str, program: Program) -> None:
        seen = self._seen.setdefault(structure, set())
        if len(seen) < 2:
            seen.add(program.fingerprint)
