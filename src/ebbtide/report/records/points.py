"""The frontier of a step, memory against time, as points: plans, what a planner refused, and the unplanned step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.errors import UsageError
from ebbtide.report.records.curve import Curve
from ebbtide.step.plan import PlanRecord

__all__ = ["Measured", "Point", "points_of"]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run of a step was measured to take.

    Attributes:
        label: what ran: ``"planned"``, ``"unplanned"``, ``"eager"``; any other words.
        peak_bytes: resident part included.
        overhead: seconds over those of the run that it is held against, minus one; ``None`` where nothing was timed.
        curve: memory over the step; ``None`` where that was not recorded.
    """

    label: str
    peak_bytes: int
    overhead: float | None = None
    curve: Curve | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One plan, or the unplanned step.

    Attributes:
        planner: name; empty for the unplanned step.
        status: how planning ended; empty for the unplanned step.
        budget_bytes: what it was asked to stay within; ``None`` for the unplanned step.
        peak_bytes: predicted, resident part included.
        overhead: predicted, a fraction.
        bound: proven lower bound on it, or ``None``.
        measured_peak_bytes: of a run, or ``None``.
        measured_overhead: of a run, or ``None``.
        chosen: whether it is the plan that is shown in detail.
    """

    planner: str
    status: str
    budget_bytes: int | None
    peak_bytes: int
    overhead: float
    bound: float | None = None
    measured_peak_bytes: int | None = None
    measured_overhead: float | None = None
    chosen: bool = False


def points_of(
    plan: PlanRecord, others: Sequence[PlanRecord] = (), runs: Sequence[tuple[PlanRecord, Measured]] = ()
) -> tuple[Point, ...]:
    """The unplanned step, ``plan`` and ``others``, by descending peak.

    Args:
        plan: shown in detail.
        others: plans of the same step.
        runs: of these plans, those that were run, and what that took.

    Raises:
        UsageError: if one of the others is of another step.
    """
    for other in others:
        if (other.baseline_peak_bytes, other.case) != (plan.baseline_peak_bytes, plan.case):
            raise UsageError(
                f"the plans are of different steps: {plan.case} takes {plan.baseline_peak_bytes} bytes unplanned, "
                f"{other.case} {other.baseline_peak_bytes}; one frontier is of one step",
                argument="plans",
                value=other.case,
            )

    def point(each: PlanRecord) -> Point:
        run = next((measured for ran, measured in runs if ran is each), None)
        return Point(
            planner=each.planner,
            status=each.status.name,
            budget_bytes=each.budget_bytes,
            peak_bytes=each.predicted_peak_bytes,
            overhead=each.overhead,
            bound=each.bound,
            measured_peak_bytes=None if run is None else run.peak_bytes,
            measured_overhead=None if run is None else run.overhead,
            chosen=each is plan,
        )

    unplanned = Point("", "", None, plan.baseline_peak_bytes, 0.0)
    found = [unplanned, *map(point, (plan, *others))]
    return tuple(sorted(found, key=lambda each: (-each.peak_bytes, each.overhead, each.planner)))
