"""How planning ended."""

from __future__ import annotations

import enum

__all__ = ["Status"]


class Status(enum.Enum):
    """How planning ended. The value is the user's message."""

    OPTIMAL = "the plan is proven optimal in its class"
    FEASIBLE = "the plan fits the budget; its distance to the bound is given as gap"
    INFEASIBLE = "no schedule within the budget was found"
    TIME_LIMIT = "the time limit or an interrupt came first; this is the best plan found until then"
