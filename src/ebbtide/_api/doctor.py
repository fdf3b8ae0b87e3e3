"""``doctor``: what a training step holds, what pins its memory, and what would lower it; nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ebbtide._api.estimate import AheadStep, capture_ahead
from ebbtide._api.refusals import require_module
from ebbtide.checks import text, whole
from ebbtide.entry_points import options_of, takes_options
from ebbtide.errors import BudgetError
from ebbtide.options import Options
from ebbtide.planners import planner_named
from ebbtide.planners.narration import interruption_noted, narrated
from ebbtide.planning.pipeline import PlanningOptions
from ebbtide.planning.rewriting import rewritings
from ebbtide.report.records.diagnosis import Findings, find
from ebbtide.step.machine import Machine
from ebbtide.units import Budget

if TYPE_CHECKING:
    import torch

__all__ = ["doctor", "examine"]

_ANY_BUDGET = Budget(bytes=2**62)  # so that the plan is the unplanned step itself


@takes_options
def doctor(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: str | int | Budget | None = None,
    machine: str | Machine | None = None,
    loss: Callable[[Any], Any] | None = None,
    top: int = 10,
    name: str = "",
    options: Options | None = None,
) -> Findings:
    """What one training call of ``model`` holds: the record that ``ebbtide doctor`` prints.

    Args:
        model: as for :func:`ebbtide.plan`.
        args: positional arguments of the call.
        kwargs: keyword arguments.
        budget: one to judge: the findings then say what a plan within it costs, or that there is none.
        machine: as in :class:`Options`.
        loss: as in :class:`Options`.
        top: how many places to list by bytes.
        name: of the case, for reports.
        options: all else; planner, effort and time limit are of the plan within the budget. The findings say what each
            of the rewrites would lower, and why others are left.

    Raises:
        UsageError: for an argument that is none of what is said above, naming it and what it takes.
        CaptureError: if the call is not one graph; its attributes say where and what to do.
    """
    require_module(model, "doctor")
    text("name", name)
    asked = options_of("doctor", options, machine=machine, loss=loss)
    limit = None if budget is None else Budget.parse(budget)
    whole(1)("top", top)
    planner_named(asked.planner)
    with narrated(asked.tell), interruption_noted(asked.tell) as tell:
        asked = replace(asked, progress=tell)
        ahead = capture_ahead(model, args, kwargs, options=asked, name=name)
        return examine(ahead, limit, PlanningOptions.of(asked), top)


def examine(step: AheadStep, budget: Budget | None, options: PlanningOptions, top: int) -> Findings:
    """The findings of a captured step; arguments as for :func:`doctor`."""
    # With tiers the smallest budget is that of plans that move, which keep_all does not look for.
    plan = step.plan(_ANY_BUDGET, replace(options, planner="auto" if step.tiers else "keep_all"))
    found = find(plan, top, resident=step.resident, types=step.layer_types)
    held = step.resident_bytes + step.reserve_bytes
    rewrites = rewritings(step.program, step.alternatives or (), step.skipped, held)
    found = replace(found, rewrites=rewrites, advice=tuple(found.advice_beside(rewrites)))
    if budget is None:
        return found
    try:
        plan = step.plan(budget, options)
    except BudgetError as error:
        return replace(
            found, budget_bytes=error.budget_bytes, smallest_bytes=error.smallest_bytes or found.smallest_bytes
        )
    used = () if plan.rewritten is None else tuple(map(str, plan.rewritten.rewrites))
    return replace(
        found,
        budget_bytes=plan.budget_bytes,
        overhead=plan.overhead,
        smallest_bytes=plan.smallest_bytes,
        rewritten=used,
    )
