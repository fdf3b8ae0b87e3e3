"""The demo's proof: what was promised, what was measured, and whether both agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TextIO

from ebbtide.report.records.curve import Curve
from ebbtide.report.records.points import Measured
from ebbtide.step.plan import PlanRecord
from ebbtide.units import format_allowed, format_bytes, format_count, format_gap, format_percent, format_seconds

__all__ = ["DemoRecord", "write_demo"]

_FAR = 0.05
"""Of the step's time: a measured overhead so far above the predicted one gets its reason."""


@dataclass(frozen=True, kw_only=True)
class DemoRecord:
    """What three copies of a model gave: planned, unplanned (captured order) and eager.

    Attributes:
        plan: that ran, with what was resident at the start of the measured step.
        steps: optimizer steps of every copy.
        losses: of the planned copy.
        losses_equal: whether every loss is bit-equal to eager's.
        parameters_equal: whether all parameters are, after the last step.
        random_state_equal: whether the random state is, after the last step.
        verified_buffers: recomputed buffers that were held against their first bits.
        measured_peak_bytes: of one planned optimizer step.
        unplanned_peak_bytes: of the same step in captured order.
        eager_peak_bytes: of the same step in eager.
        measured_step_seconds: median CPU seconds of a planned forward and backward.
        unplanned_step_seconds: of an unplanned one.
        eager_step_seconds: of an eager one.
        curves: memory over a planned, an unplanned and an eager step, where that was recorded.
    """

    plan: PlanRecord
    steps: int
    losses: tuple[float, ...]
    losses_equal: bool
    parameters_equal: bool
    random_state_equal: bool
    verified_buffers: int
    measured_peak_bytes: int
    unplanned_peak_bytes: int
    eager_peak_bytes: int
    measured_step_seconds: float
    unplanned_step_seconds: float
    eager_step_seconds: float
    curves: tuple[Curve | None, Curve | None, Curve | None] = (None, None, None)

    @property
    def measured_overhead(self) -> float:
        """Planned over unplanned CPU seconds, minus one."""
        return self.measured_step_seconds / self.unplanned_step_seconds - 1

    @property
    def measured(self) -> tuple[Measured, ...]:
        """What the three copies took, for a report."""
        eager_overhead = self.eager_step_seconds / self.unplanned_step_seconds - 1
        planned, unplanned, eager = self.curves
        return (
            Measured("planned", self.measured_peak_bytes, self.measured_overhead, planned),
            Measured("unplanned", self.unplanned_peak_bytes, None, unplanned),
            Measured("eager", self.eager_peak_bytes, eager_overhead, eager),
        )

    @property
    def recomputed(self) -> int:
        """Runs beyond the first, over all ops."""
        return sum(int(runs) - 1 for runs in self.plan.timeline.runs if runs > 1)

    @property
    def promises(self) -> dict[str, bool]:
        """Each promise in words, and whether it was kept."""
        return {
            f"losses of all {self.steps} steps are bit-equal to eager's": self.losses_equal,
            "parameters after the last step are bit-equal to eager's": self.parameters_equal,
            "the random state after the last step is eager's": self.random_state_equal,
            "the measured peak is within the budget": self.measured_peak_bytes <= self.plan.budget_bytes,
        }

    @property
    def within_budget(self) -> bool:
        """Whether all promises were kept."""
        return all(self.promises.values())

    def to_json(self) -> dict[str, Any]:
        """The record as plain data: the plan's summary and what was measured."""
        return {
            **self.plan.summary(),
            "steps": self.steps,
            "losses": list(self.losses),
            "losses_equal": self.losses_equal,
            "parameters_equal": self.parameters_equal,
            "random_state_equal": self.random_state_equal,
            "recomputed": self.recomputed,
            "verified_buffers": self.verified_buffers,
            "measured_peak_bytes": self.measured_peak_bytes,
            "measured_unplanned_peak_bytes": self.unplanned_peak_bytes,
            "measured_eager_peak_bytes": self.eager_peak_bytes,
            "measured_overhead": self.measured_overhead,
            "measured_step_seconds": self.measured_step_seconds,
            "measured_unplanned_step_seconds": self.unplanned_step_seconds,
            "measured_eager_step_seconds": self.eager_step_seconds,
        }


def write_demo(record: DemoRecord, stream: TextIO) -> None:
    """Write the proof to ``stream``."""
    for line in (*_peaks(record), "", *_facts(record), "", *_promises(record)):
        print(line, file=stream)


def _peaks(record: DemoRecord) -> list[str]:
    """A row per copy: peaks and CPU time a step, predicted and measured."""
    plan = record.plan
    rows = [
        ("", "peak", "peak", "CPU time a step", "overhead", "overhead"),
        ("", "predicted", "measured", "measured", "predicted", "measured"),
        ("eager", "", format_bytes(record.eager_peak_bytes), format_seconds(record.eager_step_seconds), "", ""),
        (
            "unplanned",
            format_bytes(plan.baseline_peak_bytes),
            format_bytes(record.unplanned_peak_bytes),
            format_seconds(record.unplanned_step_seconds),
            "",
            "",
        ),
        (
            "planned",
            format_bytes(plan.predicted_peak_bytes),
            format_bytes(record.measured_peak_bytes),
            format_seconds(record.measured_step_seconds),
            format_percent(plan.overhead),
            format_percent(record.measured_overhead),
        ),
        ("budget", format_allowed(plan.budget_bytes), "", "", "", ""),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in ([*zip(row, widths, strict=True)] for row in rows)
    ]


def _facts(record: DemoRecord) -> list[str]:
    plan = record.plan
    shown = sorted({1, *range(5, record.steps, 5), record.steps})
    losses = ", ".join(f"{record.losses[step - 1]:.4f} at {step}" for step in shown)
    share = plan.budget_bytes / record.unplanned_peak_bytes
    return [
        f"model       {plan.case}, {format_count(len(plan.program.ops), 'op')}, "
        "trained on the Python standard library's sources",
        f"budget      {format_percent(share)} of the unplanned peak, {format_percent(_eager_share(record))} of eager's",
        *_bound(record),
        f"recomputed  {format_count(record.recomputed, 'op')} a step; "
        f"{format_count(record.verified_buffers, 'buffer')} verified in the first step",
        f"losses      {losses}",
    ]


def _bound(record: DemoRecord) -> list[str]:
    """What is proven of the predicted overhead; the measured one is no part of it, and may be below."""
    plan = record.plan
    if plan.bound is None:
        return ["bound       none is proven"]
    lines = [
        f"bound       {format_percent(plan.bound)} of predicted overhead at the least, this plan's is "
        f"{format_gap(plan.gap or 0.0)} above ({plan.bound_class})"
    ]
    if not plan.bound <= record.measured_overhead <= plan.overhead + _FAR:
        lines.append(
            f"            the measured {format_percent(record.measured_overhead)} is of other costs: plan and bound "
            "are for ops as they were timed alone, and whatever else the machine did falls on what is measured"
        )
    return lines


def _eager_share(record: DemoRecord) -> float:
    return record.plan.budget_bytes / record.eager_peak_bytes


def _promises(record: DemoRecord) -> list[str]:
    return [f"{'kept  ' if kept else 'BROKEN'}  {words}" for words, kept in record.promises.items()]
