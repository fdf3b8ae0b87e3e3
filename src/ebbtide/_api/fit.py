"""``fit`` and ``unfit``: the model keeps its identity, its class is swapped (``engine/fitted_class.py``).

What Ebbtide knows about the model lives outside it in a :class:`~ebbtide.engine.model.FittedModel`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar, cast

import torch

from ebbtide._api.auto_budget import AUTO, budget_from
from ebbtide._api.refusals import (
    refuse_foreign_optimizer,
    refuse_to_fit,
    refuse_to_offload,
    refuse_to_step_inside,
    require_module,
)
from ebbtide.engine.calls import Calls, watch_optimizers
from ebbtide.engine.configuration import Configuration, Request
from ebbtide.engine.fitted_class import FITTED, fitted_class, watched_of_fitted
from ebbtide.engine.gradient_watcher import backwards_so_far
from ebbtide.engine.in_pieces import StepInPieces
from ebbtide.engine.model import FittedModel
from ebbtide.engine.optimizer_link import OptimizerLink
from ebbtide.engine.step import Step
from ebbtide.entry_points import options_of, takes_options
from ebbtide.errors import PlanMismatch, UsageError
from ebbtide.faults import users_level
from ebbtide.measurement.batches import watch_batches
from ebbtide.measurement.device import on_device_of
from ebbtide.measurement.reserved import too_large_for_the_card
from ebbtide.measurement.resident import device_of
from ebbtide.names import with_known_keywords
from ebbtide.optimizer.in_step.coupling import may_step_inside
from ebbtide.optimizer.in_step.optimizer_in_backward import OptimizerInBackward
from ebbtide.optimizer.offload.optimizer_offload import offload_of
from ebbtide.options import Options
from ebbtide.planners import Progress, planner_named
from ebbtide.planners.narration import aloud
from ebbtide.planners.search.compile_beside import begin_compiling
from ebbtide.planning.cache import PlanCache
from ebbtide.planning.pipeline import PlanningOptions
from ebbtide.planning.shape_plans import Buckets
from ebbtide.ranks.rank_group import say_alive
from ebbtide.report.plan import Plan
from ebbtide.step.machine import Machine
from ebbtide.tiers import parse_tiers
from ebbtide.torch_seams.optimizers import gradient_of
from ebbtide.torch_seams.storages import parameters_in
from ebbtide.transfers.links import this_machine
from ebbtide.transfers.paths import TransferPath
from ebbtide.transfers.tiers import open_tiers
from ebbtide.units import Budget

__all__ = ["calls_of", "fit", "no_update", "plan_of", "set_budget", "set_optimizer", "step_of", "total_norm", "unfit"]

ModelT = TypeVar("ModelT", bound=torch.nn.Module)


@takes_options
def fit(
    model: ModelT,
    budget: str | int | Budget | Plan = AUTO,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    tiers: str | Sequence[str] | None = None,
    step: Literal["outside", "inside"] | None = None,
    progress: Callable[[Progress], None] | None = aloud,
    options: Options | None = None,
) -> ModelT:
    """Keep every training step of ``model`` within ``budget``; returns the same object.

    The step is captured and planned at the first training call of each input signature, before anything runs.
    Calls without gradients run as before.

    Args:
        model: any module. Plans are best if its training call returns the scalar loss; otherwise the first step
            runs in as little memory as possible and what the loss takes outside is measured and reserved.
        budget: bytes of the step's peak allocated memory, everything counted: ``"12GiB"``, ``"8GB"``, an ``int``,
            ``"60%"`` of the same step's unplanned peak, or a :class:`Plan` to run. ``"auto"`` is what the model's card
            has free, less 5 % for fragments.
        optimizer: that trains the model; as in :class:`Options`.
        tiers: as in :class:`Options`.
        step: as in :class:`Options`.
        progress: as in :class:`Options`.
        options: all else.

    Raises:
        UsageError: for an argument that is none of what is said above; for a model that is fitted already, is a
            ``torch.jit`` module, has no memory (``meta``), is spread over devices, has its weights offloaded by hooks,
            or is on a device that is neither CPU nor CUDA.
        BudgetError: at the first training call, before any training, if the budget is too small.
        CaptureError: at the first training call, if the step is not one graph.
        PlanMismatch: at the first training call, if the given plan is of another program, machine or torch build.
        TierError: if a tier cannot be used; in a step, if one is full or fails.
    """
    require_module(model, "fit")
    if model in FITTED:
        raise UsageError(
            "the model is fitted already; ebbtide.set_budget(model, budget) gives it another budget, "
            "and ebbtide.unfit(model) first lets you fit it with other options",
            argument="model",
        )
    _require_made(optimizer)
    asked = options_of("fit", options, optimizer=optimizer, tiers=tiers, step=step, progress=progress)
    optimizer = _require_made(asked.optimizer)
    planner_named(asked.planner)
    asked.require_complete()
    limit, given = _limit_of(model, budget)
    _refuse_two_plans(given, asked.start)
    refuse_to_fit(model)
    refuse_foreign_optimizer(model, optimizer)
    _warn_of_the_card(model, limit)
    named = parse_tiers(list(given.tiers) if given is not None and asked.tiers is None else asked.tiers)
    opened = open_tiers(named, device_of([model]))
    _require_tiers(given, opened, f"tiers={asked.tiers!r} does not name that; leave tiers out, or name the plan's")
    if asked.offload_optimizer:
        refuse_to_offload(optimizer, opened)
    if asked.inside:
        refuse_to_step_inside(optimizer)
    FITTED[model] = fitted = _known_of(model, limit, given, asked, optimizer, opened)
    fitted.gradient_watcher.watch(parameters_in(model))
    model.__class__ = fitted_class(type(model))  # pyright: ignore[reportAttributeAccessIssue]
    watch_optimizers(watched_of_fitted)
    watch_batches(watched_of_fitted)
    begin_compiling()
    say_alive(torch.device(device_of([model])))
    return model


def _require_made(optimizer: object) -> torch.optim.Optimizer | None:
    """Refuse what is no optimizer yet, or none at all.

    Raises:
        UsageError: saying what to make first.
    """
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    what = "a function that makes one" if callable(optimizer) else type(optimizer).__name__
    how = "make it first and give it"
    if isinstance(optimizer, type):
        what, how = f"the class {optimizer.__name__}", f"make one, {optimizer.__name__}(model.parameters())"
    raise UsageError(
        f"fit takes the one optimizer that trains the model (a torch.optim.Optimizer) and not {what}: its state is "
        f"what is resident; {how}",
        argument="optimizer",
        value=optimizer,
    )


def _refuse_two_plans(plan: Plan | None, start: Plan | None) -> None:
    if plan is not None and start is not None:
        raise UsageError(
            "fit takes a plan to run or a plan to start from, not both: give a budget with "
            "options=ebbtide.Options(start=plan)",
            argument="start",
            value=start,
        )


def _known_of(
    model: torch.nn.Module,
    limit: Budget,
    plan: Plan | None,
    options: Options,
    optimizer: torch.optim.Optimizer | None,
    tiers: dict[str, TransferPath],
) -> FittedModel:
    """What is known of ``model`` before its first call, all refusals behind it."""
    planned_here = plan is None
    planning = replace(
        PlanningOptions.of(options),
        cache=PlanCache(),
        quick=options.refine,
        buckets=Buckets(),
        machine=_machine_at_hand(model, tiers) if planned_here else None,
        tiers=tuple(tiers) if planned_here else (),
        takes_inside=partial(may_step_inside, None if optimizer is None else weakref.ref(optimizer)),
    )
    moves, updates = optimizer if options.offload_optimizer else None, optimizer if options.inside else None
    return FittedModel(
        plain_class=type(model),
        configuration=Configuration(
            planning=planning,
            verify=options.verify,
            on_violation=options.on_violation,
            in_pieces=options.pieces == "auto",
            every_output=options.every_output,
            start=options.start,
            rewrites=options.rewrite_rules,
            first_rewrites=options.first_rules,
            tiers=tiers,
        ),
        request=Request(limit, plan),
        optimizers=OptimizerLink(
            optimizer,
            offloaded=None if moves is None else offload_of(moves, next(iter(tiers.values()))),
            in_backward=None if updates is None else OptimizerInBackward(updates, options.max_norm),
        ),
        calls=Calls(
            fitted_with_gradients=any(gradient_of(each) is not None for each in model.parameters()),
            backwards_before=backwards_so_far(),
        ),
    )


def _require_tiers(plan: Plan | None, tiers: Mapping[str, TransferPath], otherwise: str) -> None:
    """Refuse a plan that moves tensors to a tier that is not among ``tiers``.

    Raises:
        PlanMismatch: with ``otherwise``.
    """
    if plan is not None and (missing := set(plan.tiers).difference(tiers)):
        raise PlanMismatch(
            f"the plan for {plan.case} moves tensors to {', '.join(sorted(missing))}, and {otherwise}",
            differences=[f"tiers: plan {list(plan.tiers)}, here {sorted(tiers)}"],
        )


def _machine_at_hand(model: torch.nn.Module, tiers: Mapping[str, TransferPath]) -> Machine | None:
    with on_device_of([model]):
        return this_machine(tiers, device_of([model]))


def _warn_of_the_card(model: torch.nn.Module, limit: Budget) -> None:
    if said := too_large_for_the_card([model], limit.bytes):
        warnings.warn(said, stacklevel=users_level())


@with_known_keywords
def set_budget(model: ModelT, budget: str | int | Budget | Plan) -> ModelT:
    """Give a fitted model another budget, from its next training call on; returns the same object.

    Nothing is captured again: a new plan is made for the step that is known.

    Args:
        model: fitted.
        budget: as for :func:`fit`.

    Raises:
        UsageError: if the model is not fitted, or for a budget that is none.
        PlanMismatch: for a plan that moves tensors to a tier that the model was fitted without.
    """
    fitted = _fitted(model, "set_budget")
    limit, plan = _limit_of(model, budget)
    _warn_of_the_card(model, limit)
    configuration = fitted.configuration
    tiers = configuration.tiers
    had = f"tiers={sorted(tiers)}" if tiers else "tiers"
    how = "with" if tiers else "without"
    _require_tiers(
        plan,
        tiers,
        f"the model was fitted {how} {had}; ebbtide.unfit(model), then ebbtide.fit(model, plan), takes the plan's",
    )
    planning = configuration.planning
    if plan is None and tiers and not planning.tiers:  # a plan was given so far: no link had to be known
        planning = replace(planning, machine=_machine_at_hand(model, tiers), tiers=tuple(tiers))
        fitted.configure(replace(configuration, planning=planning))
    fitted.set_budget(limit, plan)
    return model


@with_known_keywords
def set_optimizer(model: ModelT, optimizer: torch.optim.Optimizer) -> ModelT:
    """Tell of the optimizer that trains a fitted model, where it is made after :func:`fit`; returns the same object.

    Its state counts as resident from the next training call on, also before its first step makes it. Nothing is
    captured again. Of a model that was fitted with ``offload_optimizer`` its state is the one that moves from now on.

    Args:
        model: fitted.
        optimizer: of the model's parameters; the state of one that it replaces counts as long as you keep that one.

    Raises:
        UsageError: if the model is not fitted, for what is no optimizer, or for another model's.
        TierError: if the state of the one that was given before could not be brought back. The model has the new one.
    """
    fitted = _fitted(model, "set_optimizer")
    if not isinstance(optimizer, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"set_optimizer takes the optimizer that trains the model (a torch.optim.Optimizer), not "
            f"{type(optimizer).__name__}",
            argument="optimizer",
            value=optimizer,
        )
    refuse_foreign_optimizer(model, optimizer)
    link, tiers = fitted.optimizers, fitted.configuration.tiers
    if link.in_backward is not None and optimizer is not link.declared:
        refuse_to_step_inside(optimizer)
    before = None if optimizer is link.declared else link.offloaded
    if before is not None:
        refuse_to_offload(optimizer, tiers)
    fitted.set_optimizer(optimizer)
    if before is not None:
        link.offloaded = offload_of(optimizer, next(iter(tiers.values())))
        before.release()
    return model


@with_known_keywords
def calls_of(model: torch.nn.Module) -> Calls:
    """How the calls of a fitted model went: how many were planned, and how many were not and why.

    Returns:
        :attr:`~ebbtide.engine.calls.Calls.planned`, a number, and :attr:`~ebbtide.engine.calls.Calls.unplanned`,
        numbers by reason, counted since :func:`fit`.

    Raises:
        UsageError: if the model is not fitted.
    """
    return _fitted(model, "calls_of").calls.copy()


def _limit_of(model: torch.nn.Module, budget: str | int | Budget | Plan) -> tuple[Budget, Plan | None]:
    """The budget, and the plan to run if one was given in its place."""
    if isinstance(budget, Plan):
        return Budget(bytes=budget.budget_bytes), budget
    return budget_from(budget, [model]), None


@with_known_keywords
def unfit(model: ModelT) -> ModelT:
    """Undo :func:`fit`; returns the same object, unplanned again.

    Raises:
        UsageError: if the model is not fitted.
        TierError: if an optimizer's state could not be brought back; the optimizer's next step tries again.
    """
    fitted = _fitted(model, "unfit")
    del FITTED[model]
    fitted.pending.disturb()
    fitted.judge.end()
    fitted.gradient_watcher.end()
    fitted.refinements.end()
    if type(model).__dict__.get("_ebbtide_plain") is fitted.plain_class:  # not one that it was given since
        model.__class__ = fitted.plain_class  # pyright: ignore[reportAttributeAccessIssue]
    fitted.optimizers.close()
    return model


@with_known_keywords
def no_update(model: torch.nn.Module) -> AbstractContextManager[None]:
    """A context for calls whose gradients are to be accumulated, of a model that is fitted with ``step="inside"``.

    Calls of the model inside of it leave their gradients as without ``step="inside"``; the first backward of a call
    outside of it adds its own and updates. As with ``DistributedDataParallel.no_sync``, it is the forward that has to
    be inside. Of a model with its optimizer outside of the step it changes nothing.

    Args:
        model: fitted.

    Raises:
        UsageError: if the model is not fitted.
    """
    in_backward = _fitted(model, "no_update").optimizers.in_backward
    return nullcontext() if in_backward is None else in_backward.accumulating()


@with_known_keywords
def total_norm(model: torch.nn.Module) -> torch.Tensor | None:
    """The norm of all gradients of the last step that clipped them, before that; ``None`` before the first.

    What ``torch.nn.utils.clip_grad_norm_`` returns, of a model that is fitted with ``max_norm``.

    Args:
        model: fitted.

    Raises:
        UsageError: if the model is not fitted, or without ``max_norm``.
    """
    inside = _fitted(model, "total_norm").optimizers.in_backward
    if inside is None or inside.max_norm is None:
        raise UsageError(
            "the model is fitted without max_norm, so its steps take no norm of its gradients; "
            'ebbtide.fit(model, budget, optimizer=optimizer, step="inside", options=ebbtide.Options(max_norm=...)) '
            "does, and torch.nn.utils.clip_grad_norm_ returns it where the optimizer is outside of the step",
            argument="model",
        )
    return inside.total_norm


@with_known_keywords
def step_of(model: torch.nn.Module) -> Step | StepInPieces | None:
    """The step that ran last, with its plan and what was verified and measured; ``None`` before the first.

    Raises:
        UsageError: if the model is not fitted.
    """
    return _fitted(model, "step_of").last


@with_known_keywords
def plan_of(model: torch.nn.Module) -> Plan | None:
    """The plan of the step that ran last; ``None`` where none has run within the budget that is set.

    That is so before the first call, from :func:`set_budget` to the next one, and after a first call that was refused
    or failed: nothing of it has run, and its error says what would do, such as ``BudgetError.smallest_bytes``.

    Raises:
        UsageError: if the model is not fitted.
    """
    step = _fitted(model, "plan_of").last
    return step.plan if step is not None else None


def _fitted(model: torch.nn.Module, caller: str) -> FittedModel:
    """What is known of ``model``.

    Raises:
        UsageError: if it is not fitted, or no module.
    """
    require_module(model, caller)
    fitted = FITTED.get(model)
    if fitted is None:
        named = cast("Iterable[tuple[str, torch.nn.Module]]", model.named_modules())
        inside = [name for name, part in named if part in FITTED]
        if inside:
            raise UsageError(
                f"what is fitted is {inside[0]} in this {type(model).__name__}, which was put around it after fit, as "
                f"PEFT does: give {caller} that one, model.get_submodule({inside[0]!r})",
                argument="model",
            )
        raise UsageError(
            "the model is not fitted (a copy of a fitted model, or one that was loaded, is a plain model); "
            "call ebbtide.fit(model, budget) first",
            argument="model",
        )
    return fitted
