"""The refusal of a budget: what to do, why, and what the budget has to hold in columns, in one form whoever refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ebbtide.errors import BudgetError
from ebbtide.step.resident_in_words import parts_of
from ebbtide.units import format_allowed, format_bytes, format_rows

__all__ = ["refused_budget"]


def refused_budget(
    reason: str,
    *,
    remedy: str,
    budget_bytes: int,
    floor_bytes: int,
    smallest_bytes: int,
    resident_bytes: int,
    resident_parts: Mapping[str, int],
    pinned_by: str,
    needs: Sequence[tuple[str, int, str]],
    reserve_bytes: int = 0,
) -> BudgetError:
    """The refusal of ``budget_bytes``.

    Args:
        reason: why it is refused.
        remedy: what to do.
        budget_bytes: that was asked for.
        floor_bytes: as in :class:`~ebbtide.errors.BudgetError`.
        smallest_bytes: likewise.
        resident_bytes: before the step, without the reserve.
        resident_parts: what that is, as far as it is known by kind.
        pinned_by: the op that pins the floor, or what else does.
        needs: what is needed instead: a name, bytes and a remark each.
        reserve_bytes: kept free inside of the budget.
    """
    parts = parts_of(resident_parts, resident_bytes, reserve_bytes)
    resident = ("resident before the step", sum(parts.values()), "whatever the plan")
    rows = [*needs, resident, *((f"  {kind}", size, "") for kind, size in parts.items())]
    budget = ("budget", format_allowed(budget_bytes), budget_bytes, "")
    return BudgetError(
        reason,
        remedy=remedy,
        figures=format_rows([budget, *((name, format_bytes(size), size, remark) for name, size, remark in rows)]),
        budget_bytes=budget_bytes,
        floor_bytes=floor_bytes,
        smallest_bytes=smallest_bytes,
        resident_bytes=resident_bytes + reserve_bytes,
        pinned_by=pinned_by,
        resident_parts=parts,
    )
