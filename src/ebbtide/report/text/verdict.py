"""The verdict on a plan: whether the step fits, what that costs, and what to try next. At most three lines."""

from __future__ import annotations

from ebbtide.step.machine import is_elsewhere
from ebbtide.step.plan import PlanRecord
from ebbtide.step.provenance import LossPlace
from ebbtide.units import format_allowed, format_bytes, format_percent

__all__ = ["verdict_of"]

_NOTHING = 1e-4
"""Overhead that is not worth a word."""
_DEAR = 0.1
"""Overhead from which on something cheaper is worth trying."""
_MUCH_LESS = 0.9
"""Of a budget, what is worth saying that it may be."""


def verdict_of(plan: PlanRecord) -> list[str]:
    """The verdict on ``plan``, a line each."""
    return [_fits(plan), *_costs(plan), *_next(plan)]


def _fits(plan: PlanRecord) -> str:
    peak, unplanned = format_bytes(plan.predicted_peak_bytes), format_bytes(plan.baseline_peak_bytes)
    if (usable := _usable(plan)) is not None and plan.predicted_peak_bytes > usable:
        there = f"{format_allowed(usable)} of {plan.provenance.machine} are usable"
        return f"{plan.case} does not fit: it takes {peak}, and {there}"
    outside = ", without the loss, which is outside the model" if plan.provenance.loss is LossPlace.OUTSIDE else ""
    has = "" if usable is None else f" ({plan.provenance.machine} has {format_allowed(usable)} usable)"
    within = f"{peak} of {format_allowed(plan.budget_bytes)}{has}{outside}"
    if _as_it_is(plan):
        return f"{plan.case} fits as it is: {within}, no time added"
    return f"{plan.case} fits with a plan: {within}, {unplanned} without"


def _usable(plan: PlanRecord) -> int | None:
    source = plan.provenance
    return source.memory_bytes if source.usable_bytes is None else source.usable_bytes


def _as_it_is(plan: PlanRecord) -> bool:
    return plan.rewritten is None and not plan.tiers and plan.predicted_peak_bytes >= plan.baseline_peak_bytes


def _costs(plan: PlanRecord) -> list[str]:
    if _as_it_is(plan):
        return []
    if plan.overhead < _NOTHING:
        return ["it adds no time"]
    bound = "" if plan.bound is None else f"; of such plans none adds less than {format_percent(plan.bound)}"
    estimated = ", estimated" if is_elsewhere(plan.machine) else ""
    return [f"it adds {format_percent(plan.overhead)} of time{estimated}{bound}"]


def _next(plan: PlanRecord) -> list[str]:
    """The first of what may be tried that would help."""
    usable = _usable(plan)
    if usable is not None and plan.predicted_peak_bytes > usable:
        smallest = format_bytes(plan.smallest_bytes)
        if plan.smallest_is_searched and plan.smallest_bytes <= usable:
            return [f"next: a budget of {format_allowed(usable)} or less; down to {smallest} can be held"]
        return ['next: a smaller batch or length, tiers="host", or a larger card (ebbtide machines)']
    if plan.overhead > _DEAR and not plan.tiers and plan.machine is not None and plan.machine.links:
        tiers = ",".join(sorted(plan.machine.links, reverse=True))
        return [f'next: tiers="{tiers}" moves tensors where that adds less time than computing them again']
    if plan.smallest_is_searched and plan.smallest_bytes < _MUCH_LESS * plan.budget_bytes:
        return [f"next: less is possible, down to {format_bytes(plan.smallest_bytes)}; or a larger batch (max_batch)"]
    return []
