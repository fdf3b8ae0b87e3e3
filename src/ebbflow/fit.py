"""``fit`` and ``unfit``: the model keeps its identity, its class is swapped for a generated subclass.

The subclass overrides ``forward`` alone, as PyTorch's ``fully_shard`` does, so ``isinstance``, attributes,
``state_dict`` keys, hooks, optimizers and saving keep working. What Ebbflow knows about the model lives in a
:class:`_Fitted` outside it, held weakly by the model; copies and pickles of a fitted model are plain models.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from ebbflow.capture.joint import Joint
from ebbflow.capture.rules import refuse_outside_loss
from ebbflow.cost.attach import with_measured_costs
from ebbflow.cost.cache import device_context
from ebbflow.errors import BudgetError, PlanMismatch, UsageError
from ebbflow.measure.optimizer_state import future_state_bytes
from ebbflow.measure.resident import device_of, start_bytes
from ebbflow.plan import Plan
from ebbflow.planners import planner_named
from ebbflow.planning import PlanningOptions, make_plan
from ebbflow.runtime.compiled import CompiledStep, StaleCapture
from ebbflow.runtime.reserve import reserve_bytes
from ebbflow.runtime.step import PlannedStep
from ebbflow.units import Budget

__all__ = ["fit", "plan_of", "require_module", "step_of", "unfit"]

ModelT = TypeVar("ModelT", bound=torch.nn.Module)


@dataclass
class _Fitted:
    """What is known about one fitted model."""

    plain_class: type[torch.nn.Module]
    budget: Budget
    given_plan: Plan | None
    options: PlanningOptions
    optimizer: torch.optim.Optimizer | None
    verify: bool
    steps: dict[object, CompiledStep] = field(default_factory=dict[object, CompiledStep])
    last: PlannedStep | None = None


_FITTED: weakref.WeakKeyDictionary[torch.nn.Module, _Fitted] = weakref.WeakKeyDictionary()


def fit(
    model: ModelT,
    budget: str | int | Budget | Plan,
    *,
    planner: str = "auto",
    optimizer: torch.optim.Optimizer | None = None,
    effort: int | None = None,
    verify: bool = True,
) -> ModelT:
    """Keep every training step of ``model`` within ``budget``; returns the same object.

    The step is captured and planned at the first training call of each input signature, before anything runs.
    Calls without gradients run as before.

    Args:
        model: any module whose training call returns a scalar loss.
        budget: bytes of the step's peak allocated memory, everything counted: ``"12GiB"``, ``"8GB"``, an ``int``,
            ``"60%"`` of the same step's unplanned peak, or a :class:`Plan` to run.
        planner: name of the planner.
        optimizer: if given, its state counts as resident, also before its first step makes it.
        effort: local-search moves; the default is about a second on a 600-op program.
        verify: prove the first step (every recomputed buffer has the bits it had) and measure the next.

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
    options = PlanningOptions(planner=planner)
    if effort is not None:
        options = replace(options, effort=effort)
    given = budget if isinstance(budget, Plan) else None
    limit = Budget(bytes=budget.budget_bytes) if isinstance(budget, Plan) else Budget.parse(budget)
    _FITTED[model] = _Fitted(type(model), limit, given, options, optimizer, verify)
    _swap_class(model, _fitted_class(type(model)))
    return model


def unfit(model: ModelT) -> ModelT:
    """Undo :func:`fit`; returns the same object, unplanned again.

    Raises:
        UsageError: if the model is not fitted.
    """
    fitted = _FITTED.pop(model, None)
    if fitted is None:
        raise UsageError("the model is not fitted")
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


def step_of(model: torch.nn.Module) -> PlannedStep | None:
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
        return _run(self, fitted, args, kwargs)

    def reduce(self: torch.nn.Module, protocol: Any) -> Any:
        _, _, *rest = object.__reduce_ex__(self, max(2, protocol))  # type: ignore[misc]
        return (_blank, (plain,), *rest)

    names = {"forward": forward, "__reduce_ex__": reduce, "__module__": plain.__module__, "__doc__": plain.__doc__}
    kind = type(plain.__name__, (plain,), names)
    kind.__qualname__ = plain.__qualname__
    return kind


def _run(module: torch.nn.Module, fitted: _Fitted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = device_of([module])
    key = _signature(module, device, args, kwargs)
    resident = start_bytes(module, (args, kwargs), fitted.optimizer, device)

    def fresh() -> CompiledStep:
        # The model is held weakly: what is known about it must not keep it alive.
        planner = functools.partial(_planned, weakref.ref(module), fitted, device, resident)
        return CompiledStep(planner, name=fitted.plain_class.__name__, device=device, verify=fitted.verify)

    step = fitted.steps.get(key)
    if step is None or not _still_fits(step, resident):
        step = fresh()
    try:
        outputs = step(module, fitted.plain_class.forward, args, kwargs)
    except StaleCapture:
        step = fresh()
        outputs = step(module, fitted.plain_class.forward, args, kwargs)
    # Only a step that ran is kept: whatever failed on the way is tried afresh at the next call.
    fitted.steps[key] = step
    fitted.last = step.step
    return outputs


def _still_fits(step: CompiledStep, resident: int) -> bool:
    """Whether the plan still holds: more may be resident than when it was made (optimizer state, gradients)."""
    plan = step.plan
    assert plan is not None
    return resident + plan.timeline.above_bytes <= plan.budget_bytes


def _signature(module: torch.nn.Module, device: str, args: Any, kwargs: Any) -> object:
    """What a plan depends on besides the model: arguments, modes, autocast, threads."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    parts: list[object] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
        else:
            parts.append((type(leaf).__qualname__, repr(leaf)))
    modes = (module.training, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return (tuple(parts), str(spec), modes, torch.get_num_threads())


def _planned(model: weakref.ref[torch.nn.Module], fitted: _Fitted, device: str, resident: int, joint: Joint) -> Plan:
    """The plan for a captured step. Nothing of the model has run when this returns or raises."""
    module = model()
    assert module is not None
    refuse_outside_loss(joint)
    reserve = reserve_bytes(module, device, verify=fitted.verify)
    if fitted.optimizer is not None:
        resident += future_state_bytes(fitted.optimizer)
    if fitted.given_plan is not None:
        return _given(fitted.given_plan, joint, device_context(device), resident, reserve)
    program = with_measured_costs(joint.program, joint.calls, device)
    earlier = [step.plan for step in fitted.steps.values() if step.plan is not None]
    return make_plan(
        program,
        fitted.budget,
        resident_bytes=resident,
        reserve_bytes=reserve,
        seeds=[plan.schedule for plan in earlier if plan.program.fingerprint == program.fingerprint],
        options=fitted.options,
    )


def _given(plan: Plan, joint: Joint, context: dict[str, str], resident: int, reserve: int) -> Plan:
    """The user's plan, if it is of this program and fits."""
    differences = [
        f"{key}: plan {plan.provenance.get(key)!r}, here {value!r}"
        for key, value in context.items()
        if key in ("device", "torch") and plan.provenance.get(key) != value
    ]
    if plan.program.fingerprint != joint.program.fingerprint:
        differences.append(_program_difference(plan, joint))
    if differences:
        raise PlanMismatch(
            f"the plan for {plan.case} does not belong to this step: {'; '.join(differences)}; plan anew"
        )
    moved = replace(plan, resident_bytes=resident, reserve_bytes=reserve)
    if moved.predicted_peak_bytes + reserve > plan.budget_bytes:
        raise BudgetError(
            f"the given plan needs {moved.predicted_peak_bytes + reserve} bytes here, its budget is "
            f"{plan.budget_bytes}: more is resident ({resident} bytes) than when it was made; "
            "plan anew with fit(model, budget=...)",
            budget_bytes=plan.budget_bytes,
            floor_bytes=plan.floor_bytes - plan.resident_bytes - plan.reserve_bytes + resident + reserve,
            smallest_bytes=plan.smallest_bytes - plan.resident_bytes - plan.reserve_bytes + resident + reserve,
            resident_bytes=resident,
            pinned_by=str(plan.program.ops[plan.floor_op]),
        )
    return moved


def _program_difference(plan: Plan, joint: Joint) -> str:
    ours, theirs = joint.program, plan.program
    if len(ours.ops) != len(theirs.ops):
        return f"program: the plan's has {len(theirs.ops)} ops, this one {len(ours.ops)}"
    for a, b in zip(ours.ops, theirs.ops, strict=True):
        if (a.target, a.views) != (b.target, b.views):
            return f"program: the plan's has {b.target}{b.views} where this one has {a.target}{a.views}"
    return "program: buffers differ in size"
