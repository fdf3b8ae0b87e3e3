"""``doctor``: what a training step holds, what pins its memory, and what would lower it; nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ebbtide._api.estimate import AheadStep, capture_ahead
from ebbtide._api.refusals import require_module
from ebbtide.clipping import Clipping
from ebbtide.errors import BudgetError, UsageError
from ebbtide.names import with_known_keywords
from ebbtide.options import Options, require_gradients, require_text
from ebbtide.planners import Interrupt, Progress, planner_named
from ebbtide.planners.base import DEFAULT_EFFORT
from ebbtide.planners.narration import aloud, interruption_noted, narrated
from ebbtide.planning.pipeline import PlanningOptions
from ebbtide.planning.rewriting import rewritings
from ebbtide.report.records.diagnosis import Findings, find
from ebbtide.step.machine import Machine
from ebbtide.units import Budget

if TYPE_CHECKING:
    import torch

    from ebbtide.options import AnyOptimizer, Rewrites

__all__ = ["doctor", "examine"]

_ANY_BUDGET = Budget(bytes=2**62)  # so that the plan is the unplanned step itself


@with_known_keywords
def doctor(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: str | int | Budget | None = None,
    planner: str = "auto",
    machine: str | Machine | None = None,
    tiers: str | Sequence[str] | None = None,
    loss: Callable[[Any], Any] | None = None,
    optimizer: AnyOptimizer | None = None,
    rewrites: Rewrites | None = None,
    offload_optimizer: bool = False,
    step: Literal["outside", "inside"] = "outside",
    max_norm: float | Clipping | None = None,
    scaler: torch.amp.GradScaler | None = None,
    gradients: Literal["loss", "all"] = "loss",
    effort: int = DEFAULT_EFFORT,
    time_limit: float | None = None,
    seed: int = 0,
    interrupt: Interrupt | None = None,
    progress: Callable[[Progress], None] | None = aloud,
    top: int = 10,
    name: str = "",
) -> Findings:
    """What one training call of ``model`` holds: the record that ``ebbtide doctor`` prints.

    Args:
        model: as for :func:`ebbtide.plan`.
        args: positional arguments of the call.
        kwargs: keyword arguments.
        budget: one to judge: the findings then say what a plan within it costs, or that there is none.
        planner: name of the planner that judges the budget.
        machine: as for :func:`ebbtide.plan`.
        tiers: as for :func:`ebbtide.plan`.
        loss: as for :func:`ebbtide.plan`.
        optimizer: as for :func:`ebbtide.plan`.
        rewrites: as for :func:`ebbtide.plan`; the findings say what each would lower, and why others are left.
        offload_optimizer: as for :func:`ebbtide.plan`.
        step: as for :func:`ebbtide.plan`.
        max_norm: as for :func:`ebbtide.plan`.
        scaler: as for :func:`ebbtide.plan`.
        gradients: as for :func:`ebbtide.plan`.
        effort: local-search moves of the plan within the budget.
        time_limit: seconds for that plan.
        seed: of every random choice.
        interrupt: as for :func:`ebbtide.plan`.
        progress: called with what is known while capturing and planning; ``print`` will do. By default one line is
            logged after two seconds, or a bar moves on a terminal; ``None`` says nothing.
        top: how many places to list by bytes.
        name: of the case, for reports.

    Raises:
        UsageError: for an argument that is none of what is said above, naming it and what it takes.
        CaptureError: if the call is not one graph; its attributes say where and what to do.
    """
    require_module(model, "doctor")
    require_gradients(gradients)
    require_text("name", name)
    options = Options(
        planner=planner,
        machine=machine,
        tiers=tiers,
        loss=loss,
        optimizer=optimizer,
        rewrites=rewrites,
        offload_optimizer=offload_optimizer,
        step=step,
        max_norm=max_norm,
        scaler=scaler,
        gradients=gradients,
        effort=effort,
        time_limit=time_limit,
        seed=seed,
        interrupt=interrupt,
        progress=progress,
    )
    limit = None if budget is None else Budget.parse(budget)
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"top={top!r} is not 1 or more", argument="top", value=top)
    planner_named(planner)
    with narrated(options.tell), interruption_noted(options.tell) as tell:
        options = replace(options, progress=tell)
        ahead = capture_ahead(model, args, kwargs, options=options, name=name)
        return examine(ahead, limit, PlanningOptions.of(options), top)


def examine(step: AheadStep, budget: Budget | None, options: PlanningOptions, top: int) -> Findings:
    """The findings of a captured step; arguments as for :func:`doctor`."""
    # With tiers the smallest budget is that of plans that move, which keep_all does not look for.
    plan = step.plan(_ANY_BUDGET, replace(options, planner="auto" if step.tiers else "keep_all"))
    found = find(plan, top, resident=step.resident, types=step.layer_types)
    held = step.resident_bytes + step.reserve_bytes
    rewrites = rewritings(step.program, step.alternatives, step.left, held)
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
