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


@dataclass(frozen=True, slots=True)
class Taken:
    """What one copy of the model took.

    Attributes:
        peak_bytes: of one optimizer step.
        step_seconds: median CPU seconds of a forward and backward.
        curve: memory over the measured step, where that was recorded.
    """

    peak_bytes: int
    step_seconds: float
    curve: Curve | None = None


@dataclass(frozen=True, kw_only=True)
class DemoRecord:
    """What three copies of a model gave: planned, with ``torch.utils.checkpoint``, and eager.

    Attributes:
        plan: that ran, with what was resident at the start of the measured step.
        losses: of the planned copy, one an optimizer step.
        losses_equal: whether every loss is bit-equal to eager's.
        parameters_equal: whether all parameters are, after the last step.
        random_state_equal: whether the random state is, after the last step.
        verified_buffers: recomputed buffers that were held against their first bits.
        checkpointed_blocks: of the checkpointed copy, out of ``blocks``.
        blocks: of the model.
        planned: what the planned copy took.
        checkpointed: what the one with checkpoints took.
        eager: what the one without anything took.
    """

    plan: PlanRecord
    losses: tuple[float, ...]
    losses_equal: bool
    parameters_equal: bool
    random_state_equal: bool
    verified_buffers: int
    checkpointed_blocks: int
    blocks: int
    planned: Taken
    checkpointed: Taken
    eager: Taken

    @property
    def steps(self) -> int:
        """Optimizer steps of every copy."""
        return len(self.losses)

    def over_eager(self, taken: Taken) -> float:
        """CPU seconds over eager's, minus one."""
        return taken.step_seconds / self.eager.step_seconds - 1

    @property
    def measured(self) -> tuple[Measured, ...]:
        """What the three copies took, for a report."""
        return tuple(
            Measured(label, taken.peak_bytes, None if taken is self.eager else self.over_eager(taken), taken.curve)
            for label, taken in (
                ("planned", self.planned),
                (self.checkpoints, self.checkpointed),
                ("eager", self.eager),
            )
        )

    @property
    def checkpoints(self) -> str:
        """What the peer is."""
        return f"checkpoints around {self.checkpointed_blocks} of {self.blocks} blocks"

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
            "the measured peak is within the budget": self.planned.peak_bytes <= self.plan.budget_bytes,
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
            "measured_peak_bytes": self.planned.peak_bytes,
            "measured_eager_peak_bytes": self.eager.peak_bytes,
            "measured_over_eager": self.over_eager(self.planned),
            "measured_step_seconds": self.planned.step_seconds,
            "measured_eager_step_seconds": self.eager.step_seconds,
            "checkpointed_blocks": self.checkpointed_blocks,
            "checkpointed_peak_bytes": self.checkpointed.peak_bytes,
            "checkpointed_over_eager": self.over_eager(self.checkpointed),
        }


def write_demo(record: DemoRecord, stream: TextIO) -> None:
    """Write the proof to ``stream``."""
    for line in (*_table(record), "", *_facts(record), "", *_promises(record)):
        print(line, file=stream)


def _table(record: DemoRecord) -> list[str]:
    """A row per copy: peaks and CPU time a step, predicted and measured."""
    plan = record.plan

    def row(name: str, taken: Taken, predicted_peak: str = "", predicted: str = "") -> tuple[str, ...]:
        added = "" if taken is record.eager else format_percent(record.over_eager(taken))
        peaks = (predicted_peak, format_bytes(taken.peak_bytes))
        return (name, *peaks, format_seconds(taken.step_seconds), predicted, added)

    rows = [
        ("", "peak", "peak", "CPU time a step", "added time", "over eager"),
        ("", "predicted", "measured", "measured", "predicted", "measured"),
        row("eager", record.eager),
        row(record.checkpoints, record.checkpointed),
        row("Ebbtide", record.planned, format_bytes(plan.predicted_peak_bytes), format_percent(plan.overhead)),
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
    shares = [format_percent(plan.budget_bytes / of) for of in (plan.baseline_peak_bytes, record.eager.peak_bytes)]
    return [
        f"model       {plan.case}, {format_count(len(plan.program.ops), 'op')}, "
        "trained on the Python standard library's sources",
        f"budget      {shares[0]} of the unplanned peak, {shares[1]} of eager's",
        *_peer(record),
        *_bound(record),
        f"recomputed  {format_count(record.recomputed, 'op')} a step; "
        f"{format_count(record.verified_buffers, 'buffer')} verified in the first step",
        f"losses      {losses}",
    ]


def _peer(record: DemoRecord) -> list[str]:
    """Which checkpoints were taken."""
    if record.checkpointed.peak_bytes > record.plan.budget_bytes:
        return ["checkpoints around every block, and still above the budget: they come no lower"]
    return [f"checkpoints around the first {record.checkpointed_blocks}: with one less the step is above the budget"]


def _bound(record: DemoRecord) -> list[str]:
    """What is proven of the predicted overhead; the measured one is no part of it, and may be below."""
    plan = record.plan
    if plan.bound is None:
        return ["bound       none is proven"]
    lines = [
        f"bound       {format_percent(plan.bound)} of predicted time at the least, this plan's is "
        f"{format_gap(plan.gap or 0.0)} above ({plan.bound_class})"
    ]
    if not plan.bound <= record.over_eager(record.planned) <= plan.overhead + _FAR:
        lines.append(
            "            predicted and bound are over the captured step and of ops as they were timed alone; measured "
            "is over eager's, and has whatever else the machine did"
        )
    return lines


def _promises(record: DemoRecord) -> list[str]:
    return [f"{'kept  ' if kept else 'BROKEN'}  {words}" for words, kept in record.promises.items()]
