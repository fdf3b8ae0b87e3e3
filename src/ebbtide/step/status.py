"""How planning ended."""

from __future__ import annotations

import enum

__all__ = ["Status"]


class Status(enum.Enum):
    """How planning ended. The value is the user's message."""

    OPTIMAL = "the plan is proven optimal in the class of its bound, with the costs that it was made with"
    FEASIBLE = "the plan fits the budget; its distance to the bound is given as gap"
    INFEASIBLE = "no schedule within the budget was found by this planner"
    TIME_LIMIT = "the time limit or an interrupt came first; this is the best plan found until then"
