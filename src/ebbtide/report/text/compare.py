"""Planners side by side: one row per budget and planner, as text and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

from ebbtide.step.plan import PlanRecord
from ebbtide.step.refusal import Refusal
from ebbtide.units import format_allowed, format_bytes, format_gap, format_percent, format_seconds

__all__ = ["Row", "row_of", "write_rows"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One planner at one budget; keys of the JSON form are its attributes."""

    case: str
    planner: str
    status: str
    budget_bytes: int
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    overhead: float | None = None
    measured_overhead: float | None = None
    bound: float | None = None
    bound_class: str = ""
    gap: float | None = None
    rewritten: str = ""
    """What the plan rewrites."""
    smallest_bytes: int | None = None
    """Of a row without a plan: the least budget for which one was found."""
    reason: str = ""
    """Why there is no plan."""
    plan_seconds: float
    """Seconds to plan, without the search for the smallest workable budget, which all planners share."""

    def measured(self, peak_bytes: int, overhead: float) -> Row:
        """This row with what running its plan gave."""
        return replace(self, measured_peak_bytes=peak_bytes, measured_overhead=overhead)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def row_of(case: str, outcome: PlanRecord | Refusal) -> Row:
    """The row of a plan, or of a planner that has none."""
    if isinstance(outcome, Refusal):
        return Row(
            case=case,
            planner=outcome.planner,
            status=outcome.status.name,
            budget_bytes=outcome.budget_bytes,
            smallest_bytes=outcome.error.smallest_bytes or None,
            reason=str(outcome.error),
            plan_seconds=outcome.plan_seconds,
        )
    return Row(
        case=case,
        planner=outcome.planner,
        status=outcome.status.name,
        budget_bytes=outcome.budget_bytes,
        predicted_peak_bytes=outcome.predicted_peak_bytes,
        overhead=outcome.overhead,
        bound=outcome.bound,
        bound_class=outcome.bound_class,
        gap=outcome.gap,
        rewritten="" if outcome.rewritten is None else "; ".join(map(str, outcome.rewritten.rewrites)),
        plan_seconds=outcome.plan_seconds,
    )


_COLUMNS = ("planner", "status", "peak", "measured", "overhead", "measured", "bound", "gap", "planned in", "rewritten")
_BOUNDS = "bounds and gaps are of the predicted overhead"


def write_rows(rows: Sequence[Row], stream: TextIO, note: str = "") -> None:
    """Write a table per budget to ``stream``; columns that no row fills are left out. A ``note`` comes last."""
    for budget in sorted({row.budget_bytes for row in rows}, reverse=True):
        chosen = sorted(
            (row for row in rows if row.budget_bytes == budget),
            key=lambda row: (row.overhead is None, row.overhead or 0.0, row.planner),
        )
        print(f"{chosen[0].case} within {format_allowed(budget)} ({budget} bytes)", file=stream)
        lines = [_COLUMNS, *(_cells(row) for row in chosen)]
        kept = [c for c in range(len(_COLUMNS)) if any(line[c] for line in lines[1:])]
        widths = [max(len(line[c]) for line in lines) for c in kept]
        for line in lines:
            cells = [line[c].ljust(w) if c < 2 else line[c].rjust(w) for c, w in zip(kept, widths, strict=True)]
            print(f"  {'  '.join(cells).rstrip()}", file=stream)
        least = [row.smallest_bytes for row in chosen if row.smallest_bytes is not None]
        if least and budget < min(least):
            print(f"  too small: plans were found from {format_bytes(min(least))} ({min(least)} bytes) on", file=stream)
    classes: dict[str, list[str]] = {}
    for row in rows:
        if row.bound is not None:
            planners = classes.setdefault(row.bound_class, [])
            planners += [] if row.planner in planners else [row.planner]
    for held, planners in classes.items():
        print(f"{_BOUNDS}; {', '.join(planners)}: {held}", file=stream)
    if note:
        print(note, file=stream)


def _cells(row: Row) -> tuple[str, ...]:
    def optional(value: float | None) -> str:
        return "" if value is None else format_percent(value)

    return (
        row.planner,
        row.status,
        "" if row.predicted_peak_bytes is None else format_bytes(row.predicted_peak_bytes),
        "" if row.measured_peak_bytes is None else format_bytes(row.measured_peak_bytes),
        optional(row.overhead),
        optional(row.measured_overhead),
        optional(row.bound),
        "" if row.gap is None else format_gap(row.gap),
        format_seconds(row.plan_seconds),
        row.rewritten,
    )
