"""``fit`` and ``unfit``: the model keeps its identity, its class is swapped for a generated subclass.

The subclass overrides ``forward`` alone, as PyTorch's ``fully_shard`` does, so ``isinstance``, attributes,
``state_dict`` keys, hooks, optimizers and saving keep working. What Ebbflow knows about the model lives outside it in a
:class:`~ebbflow.engine.model.FittedModel`, held weakly by the model; copies and pickles of it are plain models.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch

from ebbflow.engine.compiled import Call
from ebbflow.engine.model import FittedModel
from ebbflow.engine.spine import train
from ebbflow.engine.step import Step
from ebbflow.errors import UsageError
from ebbflow.measurement.resident import device_of
from ebbflow.planners import Progress, planner_named
from ebbflow.planners.base import silent
from ebbflow.planning.cache import PlanCache
from ebbflow.planning.pipeline import PlanningOptions
from ebbflow.planning.shape_plans import Buckets
from ebbflow.step.plan import Plan
from ebbflow.units import Budget

__all__ = ["fit", "plan_of", "require_module", "set_budget", "step_of", "unfit"]

ModelT = TypeVar("ModelT", bound=torch.nn.Module)


_FITTED: weakref.WeakKeyDictionary[torch.nn.Module, FittedModel] = weakref.WeakKeyDictionary()


def fit(
    model: ModelT,
    budget: str | int | Budget | Plan,
    *,
    planner: str = "auto",
    optimizer: torch.optim.Optimizer | None = None,
    effort: int | None = None,
    gradients: Literal["loss", "all"] = "loss",
    verify: bool = True,
    progress: Callable[[Progress], None] = silent,
) -> ModelT:
    """Keep every training step of ``model`` within ``budget``; returns the same object.

    The step is captured and planned at the first training call of each input signature, before anything runs.
    Calls without gradients run as before.

    Args:
        model: any module. Plans are best if its training call returns the scalar loss; otherwise the first step
            runs in as little memory as possible and what the loss takes outside is measured and reserved.
        budget: bytes of the step's peak allocated memory, everything counted: ``"12GiB"``, ``"8GB"``, an ``int``,
            ``"60%"`` of the same step's unplanned peak, or a :class:`Plan` to run.
        planner: name of the planner.
        optimizer: if given, its state counts as resident, also before its first step makes it.
        effort: local-search moves; the default is about a second on a 600-op program.
        gradients: which outputs take gradients. ``"loss"``: if a scalar that requires one is returned, scalars alone
            (a gradient that arrives at another output raises). ``"all"``: every output, counted whether used or not.
        verify: prove the first step (every recomputed buffer has the bits it had) and measure the next.
        progress: called with what is known while a first call captures and plans; ``print`` will do.

    Raises:
        UsageError: for a budget or planner that is none, or a model that is fitted already.
        BudgetError: at the first training call, before any training, if the budget is too small.
        CaptureError: at the first training call, if the step is not one graph.
        PlanMismatch: at the first training call, if the given plan is of another program, device or torch build.
    """
    require_module(model, "fit")
    if model in _FITTED:
        raise UsageError("the model is fitted already; call ebbflow.unfit(model) first")
    planner_named(planner)
    if gradients not in ("loss", "all"):
        raise UsageError(f'gradients={gradients!r} is neither "loss" nor "all"')
    options = PlanningOptions(planner=planner, cache=PlanCache(), buckets=Buckets(), progress=progress)
    if effort is not None:
        options = replace(options, effort=effort)
    limit, given = _limit_of(budget)
    _FITTED[model] = FittedModel(
        plain_class=type(model),
        budget=limit,
        given_plan=given,
        options=options,
        optimizer=optimizer,
        verify=verify,
        every_output=gradients == "all",
    )
    _swap_class(model, _fitted_class(type(model)))
    return model


def set_budget(model: ModelT, budget: str | int | Budget | Plan) -> ModelT:
    """Give a fitted model another budget, from its next training call on; returns the same object.

    Nothing is captured again: a new plan is made for the step that is known.

    Args:
        model: fitted.
        budget: as for :func:`fit`.

    Raises:
        UsageError: if the model is not fitted, or for a budget that is none.
    """
    fitted = _FITTED.get(model)
    if fitted is None:
        raise UsageError("the model is not fitted; call ebbflow.fit(model, budget) first")
    fitted.set_budget(*_limit_of(budget))
    return model


def _limit_of(budget: str | int | Budget | Plan) -> tuple[Budget, Plan | None]:
    """The budget, and the plan to run if one was given in its place."""
    if isinstance(budget, Plan):
        return Budget(bytes=budget.budget_bytes), budget
    return Budget.parse(budget), None


def unfit(model: ModelT) -> ModelT:
    """Undo :func:`fit`; returns the same object, unplanned again.

    Raises:
        UsageError: if the model is not fitted.
    """
    fitted = _FITTED.pop(model, None)
    if fitted is None:
        raise UsageError("the model is not fitted")
    fitted.flights.end()
    _swap_class(model, fitted.plain_class)
    return model


def require_module(value: object, caller: str) -> None:
    """Refuse what is no module.

    Raises:
        UsageError: naming the type given.
    """
    if not isinstance(value, torch.nn.Module):
        raise UsageError(f"{caller} takes a torch.nn.Module, not {type(value).__name__}")


def _swap_class(model: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
    model.__class__ = kind


def step_of(model: torch.nn.Module) -> Step | None:
    """The step that ran last, with its plan and what was verified and measured; ``None`` before the first."""
    fitted = _FITTED.get(model)
    return fitted.last if fitted is not None else None


def plan_of(model: torch.nn.Module) -> Plan | None:
    """The plan of the step that ran last; ``None`` before the first."""
    step = step_of(model)
    return step.plan if step is not None else None


def _blank(plain: type[torch.nn.Module]) -> torch.nn.Module:
    """An empty object of the model's own class, for copies and pickles."""
    return plain.__new__(plain)


@functools.cache
def _fitted_class(plain: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A subclass of ``plain`` under the same name whose ``forward`` runs planned steps."""

    @functools.wraps(plain.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        fitted = _FITTED.get(self)
        if fitted is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return plain.forward(self, *args, **kwargs)
        device = device_of([self])
        return train(fitted, Call(self, plain.forward, args, kwargs, device, fitted.every_output))

    def reduce(self: torch.nn.Module, protocol: Any) -> Any:
        _, _, *rest = object.__reduce_ex__(self, max(2, protocol))  # type: ignore[misc]
        return (_blank, (plain,), *rest)

    names = {"forward": forward, "__reduce_ex__": reduce, "__module__": plain.__module__, "__doc__": plain.__doc__}
    kind = type(plain.__name__, (plain,), names)
    kind.__qualname__ = plain.__qualname__
    return kind
