"""A planner's refusal of one budget, as plain data: it stands beside plans wherever planners are compared."""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.errors import BudgetError
from ebbtide.step.status import Status

__all__ = ["Refusal"]


@dataclass(frozen=True)
class Refusal:
    """A planner that has no plan within a budget.

    Attributes:
        planner: its name.
        budget_bytes: of the peak, resident part included.
        error: what it would have raised, with the smallest workable budget.
        plan_seconds: what that took.
        status: ``INFEASIBLE``; for a planner other than ``auto`` this means that it found none.
    """

    planner: str
    budget_bytes: int
    error: BudgetError
    plan_seconds: float
    status: Status = Status.INFEASIBLE
