"""Plans of one step over budgets, with what has none: a list that prints as a table."""

from __future__ import annotations

import io
from collections.abc import Iterable

from ebbtide.report.plan import Plan
from ebbtide.report.text.compare import row_of, write_rows
from ebbtide.step.refusal import Refusal
from ebbtide.units import format_allowed, format_bytes

__all__ = ["Frontier"]


class Frontier(list[Plan]):
    """Plans over budgets, ascending, and what has none; printed, it is a table of both.

    Attributes:
        refusals: budgets and planners without a plan, each with the reason and the least budget for which there is one.
    """

    def __init__(self, outcomes: Iterable[Plan | Refusal] = ()) -> None:
        made = list(outcomes)
        super().__init__(each for each in made if isinstance(each, Plan))
        self.refusals = tuple(each for each in made if isinstance(each, Refusal))

    def __str__(self) -> str:
        """The table."""
        stream = io.StringIO()
        name = next((each.case for each in self), "")
        write_rows([row_of(name, each) for each in (*self, *self.refusals)], stream)
        return stream.getvalue()

    def left_out(self) -> str:
        """What has no plan and why, in a sentence; empty if all have one."""
        budgets: dict[int, list[Refusal]] = {}
        for each in self.refusals:
            budgets.setdefault(each.budget_bytes, []).append(each)
        parts: list[str] = []
        for budget, refused in sorted(budgets.items()):
            least = min(each.error.smallest_bytes for each in refused)
            what = f"{', '.join(each.planner for each in refused)} within {format_allowed(budget)} ({budget} bytes)"
            too_small = f"the smallest for which a plan was found is {format_bytes(least)} ({least} bytes)"
            parts.append(f"{what}: {too_small if budget < least else 'another planner has one'}")
        return "; ".join(parts)
