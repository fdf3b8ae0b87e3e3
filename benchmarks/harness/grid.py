"""Plans on a grid of budgets from one capture: ``smallest + f * (unplanned - smallest)`` above the step's start."""

from __future__ import annotations

import time
from dataclasses import dataclass

import ebbtide
from ebbtide import Budget, Case, Plan, Program
from ebbtide.planning.pipeline import DEFAULT_EFFORT, PlanningOptions, make_plan
from ebbtide.step.machine import machine_named

__all__ = ["Captured", "captured"]


@dataclass(frozen=True)
class Captured:
    """One case's program with costs measured on this machine, and the plan that keeps everything.

    Attributes:
        keep_all: the unplanned step as a plan.
        smallest_above_bytes: the least peak above the start for which a schedule was found.
        seconds: what the capture and the costs took, the smallest schedule not counted.
    """

    keep_all: Plan
    smallest_above_bytes: int
    seconds: float

    @property
    def program(self) -> Program:
        return self.keep_all.program

    @property
    def unplanned_above_bytes(self) -> int:
        return self.keep_all.baseline.above_bytes

    def grid_bytes(self, share: float) -> int:
        """Bytes above the start at ``share`` of the way from smallest to unplanned."""
        return self.smallest_above_bytes + int(share * (self.unplanned_above_bytes - self.smallest_above_bytes))

    def plan(self, above_bytes: int, effort: int = DEFAULT_EFFORT) -> Plan:
        """The plan that stays within ``above_bytes`` above the start; ``effort`` in local-search moves."""
        base = self.keep_all
        return make_plan(
            self.program,
            Budget(bytes=base.resident_bytes + base.reserve_bytes + above_bytes),
            resident_bytes=base.resident_bytes,
            reserve_bytes=base.reserve_bytes,
            options=PlanningOptions(effort=effort),
        )


def captured(case: Case, machine: str | None = None) -> Captured:
    """``case`` captured, with the costs of its ops measured here, or by roofline for a machine of the catalogue."""
    begin = time.perf_counter()
    plan = ebbtide.plan(
        case.model,
        case.args,
        case.kwargs,
        budget="1000%" if machine is None else machine_named(machine).memory_bytes,
        machine=machine,
        name=case.name or type(case.model).__name__,
        options=ebbtide.Options(planner="keep_all"),
    )
    seconds = time.perf_counter() - begin - plan.plan_seconds
    return Captured(plan, plan.smallest_bytes - plan.resident_bytes - plan.reserve_bytes, seconds)
