"""Rows of whole steps compared bit by bit on a grid of budgets: equal, within budget, as predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

import ebbtide
from ebbtide._api.verify import Verifier
from ebbtide.planning.pipeline import DEFAULT_EFFORT
from harness.grid import captured
from harness.record import Row, at_most, holds

__all__ = ["grid_rows"]

NEAR_SMALLEST = 1.02
PREDICTION_TARGET = 0.001  # DESIGN 7: the gate on bytes above the start, on CPU


def grid_rows(
    question: str,
    name: str,
    case: ebbtide.Case,
    *,
    shares: Sequence[float],
    effort: int = DEFAULT_EFFORT,
    causes: dict[str, str] | None = None,
) -> Iterator[Row]:
    """A row per budget, at the thread count that is set.

    Args:
        question: of the rows.
        name: of the case.
        case: captured once, and once more per budget.
        shares: of the way from smallest to unplanned; 1.02 times the smallest comes last.
        effort: local-search moves per plan.
        causes: if given, why the captured step differs from eager, by case; a difference without a cause is a miss.
    """
    known = captured(case)
    verifier = Verifier(case.model, case.args, case.kwargs)
    budgets = {f"{share:.0%}": known.grid_bytes(share) for share in shares}
    budgets[f"{NEAR_SMALLEST:g} x smallest"] = int(NEAR_SMALLEST * known.smallest_above_bytes)
    for label, above in budgets.items():
        plan = known.plan(above, effort)
        yield _row(question, name, label, plan, verifier.check(plan), causes)


def _row(
    question: str, name: str, label: str, plan: ebbtide.Plan, seen: ebbtide.Verification, causes: dict[str, str] | None
) -> Row:
    as_eager = not seen.eager_differences
    columns = {
        "case": name,
        "threads": torch.get_num_threads(),
        "budget": label,
        "ops": len(plan.program.ops),
        "reruns": len(plan.schedule.computes) - 1 - len(plan.program.ops),
        "unplanned_bytes": seen.baseline_above_bytes,
        "budget_bytes": seen.budget_above_bytes,
        "predicted_bytes": seen.predicted_above_bytes,
        "measured_bytes": seen.measured_above_bytes,
        "equal_to_captured": seen.equal,
        "equal_to_eager": as_eager,
        "predicted_overhead": plan.overhead,
    }
    checks = (
        holds("bit-equal", seen.equal),
        holds("within budget", seen.within_budget),
        at_most("prediction error", abs(seen.prediction_error), PREDICTION_TARGET),
    )
    if causes is not None:
        columns["why_not_eager"] = "" if as_eager else causes.get(name, "")
        checks = (*checks, holds("equal to eager, or with a stated cause", as_eager or name in causes))
    return Row(question, columns, checks)
