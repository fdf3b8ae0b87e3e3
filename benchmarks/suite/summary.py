"""The suite's numbers over all models of a question: captured, bits, budgets; ratios beside the peers'."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from harness.record import Row, at_least, at_most
from suite.judge import AS_CAPTURED, AS_EAGER, EAGER, OURS, WRONG

__all__ = ["summary_of"]

LEAST_CAPTURED = 0.95


def summary_of(question: str, cases: Sequence[str], rows: Sequence[Row]) -> Iterator[Row]:
    """One row for what the suite is held to, and one per method.

    Args:
        question: of the rows.
        cases: every model of the question.
        rows: of those that ran.
    """
    refused = {row.columns["case"] for row in rows if "refused" in row.columns}
    ours = [row for row in rows if row.columns["method"].startswith(OURS) and "refused" not in row.columns]
    names = {row.columns["case"] for row in ours} | refused
    if not names:
        return
    captured = len(names - refused)
    wrong = sum(row.columns["bits"] == WRONG for row in ours)
    over = sum(row.columns["peak_bytes"] > row.columns["budget_bytes"] for row in ours)
    columns = {
        "case": "all",
        "method": "all",
        "models": len(names),
        "not_run": len(cases) - len(names),
        "captured": captured,
        "refused": len(refused),
        "wrong_bits": wrong,
        "not_as_eager": len({row.columns["case"] for row in ours if row.columns["bits"] == AS_CAPTURED}),
        "over_budget": over,
    }
    checks = (
        at_least("captured", captured / len(names), LEAST_CAPTURED),
        at_most("steps with wrong bits", wrong, 0),
        at_most("steps over budget", over, 0),
    )
    yield Row(question, columns, checks)
    for method in dict.fromkeys(row.columns["method"] for row in rows):
        if method not in (EAGER, OURS):
            yield _method_row(question, method, [row for row in rows if row.columns["method"] == method])


def _method_row(question: str, method: str, rows: Sequence[Row]) -> Row:
    """Means over the models that the method runs; it may run fewer than another does."""
    ran = [row.columns for row in rows if "error" not in row.columns]
    columns = {"case": "all", "method": method, "models": len(ran), "errors": len(rows) - len(ran)}
    if ran:
        columns |= {
            "not_as_eager": sum(each["bits"] != AS_EAGER for each in ran),
            "of_eager_peak": statistics.geometric_mean(each["of_eager_peak"] for each in ran),
            "compression_ratio": statistics.geometric_mean(each["compression_ratio"] for each in ran),
            "over_eager_median": statistics.geometric_mean(each["over_eager_median"] for each in ran),
        }
    return Row(question, columns)
