"""Every plan that is found quickly gives way at the next call, as to one that was looked for beside training.

What takes its place is the plan of least memory, whatever it costs: another schedule, with the same bits and within the
same budget.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ebbtide
from ebbtide.engine import refinement
from ebbtide.engine.executable import Executable
from ebbtide.engine.step import Step
from ebbtide.engine.validity import Demand
from ebbtide.planners import Problem, planner_named
from ebbtide.planning import beside, pipeline
from ebbtide.planning.cache import CachedAnswer
from ebbtide.report.plan import Plan
from ebbtide.step.provenance import Planned

__all__ = ["swap_plans"]

QUICK_EFFORT, EFFORT = 200, 300


class _Found:
    """A search that ended at once."""

    goes_on = False

    def __init__(self, _: str, problems: Sequence[Problem]) -> None:
        self._problems = problems

    def answers(self) -> list[CachedAnswer | None]:
        found = [planner_named("least_memory")(replace(each, seeds=())) for each in self._problems]
        return [None if each.schedule is None else CachedAnswer(each, None) for each in found]

    def end(self) -> None:
        pass


def swap_plans() -> None:
    """Do so from now on, in this process."""

    def put_in_place(wanted: refinement.Wanted, better: Sequence[Plan]) -> None:
        wanted.step.offer(wanted.lower(better[0]))

    def holding(self: Step, demand: Demand) -> Executable | None:
        fitting = [each for each in self.executables if each.differs(demand) is None]
        swapped = [each for each in fitting if each.plan.provenance.planned is Planned.SEARCHED]
        return next(iter([*swapped, *fitting]), None)

    patched: list[tuple[Any, str, Any]] = [
        (pipeline, "QUICK_EFFORT", QUICK_EFFORT),
        (beside.Search, "begin", staticmethod(_Found)),
        (refinement, "_put_in_place", put_in_place),
        (Step, "holding", holding),
    ]
    for where, name, value in patched:
        setattr(where, name, value)
    inspect.unwrap(ebbtide.Options.__init__).__kwdefaults__["effort"] = EFFORT
