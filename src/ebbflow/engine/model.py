"""What is known about one fitted model, and how each of its training calls gets a plan.

1. A call's *key* is what a plan depends on besides the model: its arguments, modes, autocast, threads. Each key
   has one captured step, planned before anything of its first call runs: from what other keys know (``shape_plans``),
   or by a search. Of more than :data:`_MOST_STEPS`, the one used longest ago goes. From the fifth shape of one kind
   of call on, steps share a symbolic capture (``shared_calls``).
2. A plan is made anew when it no longer holds: more is resident than it was made for (optimizer state, gradients,
   other forwards in flight), or something else has been learned about what happens between its two graphs.
3. What happens *between* the graphs is learned from the first step: a loss outside the model is measured, another
   forward of the model is known by its own plan. The first step itself is planned for the least memory then.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ebbflow.capture.joint import Joint
from ebbflow.capture.loss_place import loss_is_outside
from ebbflow.capture.symbolic.sizes import NotAtTheseSizes
from ebbflow.cost.attach import is_measured_form, with_measured_costs
from ebbflow.cost.cache import device_context
from ebbflow.engine.compiled import CompiledStep, StaleCapture
from ebbflow.engine.reserve import reserve_bytes
from ebbflow.engine.shared import SharedCapture
from ebbflow.engine.shared_calls import Kinds
from ebbflow.engine.step import PlannedStep
from ebbflow.errors import BudgetError, CaptureError, PlanMismatch
from ebbflow.measurement.optimizer_state import future_state_bytes
from ebbflow.measurement.resident import device_of, start_bytes
from ebbflow.planners import Progress
from ebbflow.planning.pipeline import PlanningOptions, make_plan
from ebbflow.step.plan import Plan
from ebbflow.step.program import Program
from ebbflow.units import Budget, format_bytes

__all__ = ["Fitted"]

_MOST_STEPS = 256  # captured steps kept of one model: 5 to 20 MiB each of the process' own memory, not of the budget
_MANY_CAPTURES = 8  # captures of one key after which it is said that something changes at every call


@dataclass(frozen=True, slots=True)
class _Between:
    """What happens between the two graphs of a step: bytes at its peak, bytes left until the step's end."""

    peak_bytes: int
    held_bytes: int


@dataclass(kw_only=True)
class Fitted:
    """One fitted model.

    Attributes:
        plain_class: the model's own class.
        budget: of every step.
        given_plan: the plan to run, if the user gave one.
        options: how to plan.
        optimizer: whose state counts as resident.
        verify: whether first steps are proven and later ones measured.
        every_output: whether outputs beside a scalar loss take gradients too.
        steps: per key, the step that ran last; the key used last comes last.
        last: the step that ran last.
    """

    plain_class: type[torch.nn.Module]
    budget: Budget
    given_plan: Plan | None
    options: PlanningOptions
    optimizer: torch.optim.Optimizer | None
    verify: bool
    every_output: bool
    steps: dict[object, CompiledStep] = field(default_factory=dict[object, CompiledStep])
    last: PlannedStep | None = None
    _between: dict[object, _Between] = field(default_factory=dict[object, _Between])
    _flights: dict[int, int] = field(default_factory=dict[int, int])
    _captures: dict[object, int] = field(default_factory=dict[object, int])
    _forgot: bool = False
    _kinds: Kinds = field(default_factory=Kinds)

    def run(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One training call of ``module``, planned."""
        device = device_of([module])
        key = _key(module, device, args, kwargs)
        resident = start_bytes(module, (args, kwargs), self.optimizer, device)
        flying = sum(self._flights.values())
        if device == "cpu":
            resident += flying  # on CUDA the allocator has counted it
        if flying and key not in self._between:
            warnings.warn(
                "another forward of this model is in flight: its backward has not come, and its plan did not leave "
                "room for this one, so the budget may not hold this once. From the next round on it is planned for. "
                "Call backward before the next forward, or compute what needs no backward under torch.no_grad()",
                stacklevel=3,
            )
        step = self.steps.get(key)
        fresh = functools.partial(self._fresh, module, key, device, resident, flying)
        if step is None or not self._still_holds(step, resident, key):
            shared = (
                None if self.given_plan is not None else self._kinds.capture_for(_modes(module, device), args, kwargs)
            )
            step = fresh(shared=shared)
        forward = self.plain_class.forward
        try:
            outputs = step(module, forward, args, kwargs)
        except CaptureError as error:
            shared, elsewhere = step.shared, isinstance(error, StaleCapture | NotAtTheseSizes)
            if shared is not None and step.step.forward_calls == 0 and (elsewhere or not shared.captured):
                self._kinds.failed(shared)
            elif not isinstance(error, StaleCapture):
                raise
            step = fresh()
            outputs = step(module, forward, args, kwargs)
        # Only a step that ran is kept: whatever failed on the way is tried afresh at the next call.
        self._keep(key, step)
        self.last = step.step
        if flying:
            self._learn_overlap(step)
        return outputs

    def _keep(self, key: object, step: CompiledStep) -> None:
        self.steps.pop(key, None)
        self.steps[key] = step
        if len(self.steps) <= _MOST_STEPS:
            return
        oldest = next(iter(self.steps))
        del self.steps[oldest]
        self._captures.pop(oldest, None)
        if not self._forgot:
            self._forgot = True
            warnings.warn(
                f"{self.plain_class.__name__} has been called with more than {_MOST_STEPS} kinds of arguments; those "
                "used longest ago are forgotten and captured again when they come back, which takes seconds. Round "
                "lengths up to a multiple of 8 or so, where padding is possible",
                stacklevel=4,
            )

    def _fresh(
        self,
        module: torch.nn.Module,
        key: object,
        device: str,
        resident: int,
        flying: int,
        *,
        shared: SharedCapture | None = None,
    ) -> CompiledStep:
        self._captures[key] = self._captures.get(key, 0) + 1
        if self._captures[key] == _MANY_CAPTURES:
            warnings.warn(
                f"{self.plain_class.__name__} has been captured {_MANY_CAPTURES} times for the same kind of call: "
                "something that its step depends on changes between calls (an attribute that counts steps, what is "
                "resident). Each capture takes seconds; keep counters in tensors (register_buffer)",
                stacklevel=2,
            )
        name = self.plain_class.__name__
        self.options.progress(Progress(f"capturing the step of {name}"))
        # The model is held weakly: what is known about it must not keep it alive.
        return CompiledStep(
            functools.partial(self._plan, weakref.ref(module), key, device, resident, flying),
            name=name,
            device=device,
            verify=self.verify,
            every_output=self.every_output,
            between=None if key in self._between else functools.partial(self._learn_between, key),
            flights=self._flights,
            shared=shared,
        )

    def _still_holds(self, step: CompiledStep, resident: int, key: object) -> bool:
        """Whether the plan of an earlier call is good for one more (definition 2)."""
        plan = step.plan
        assert plan is not None
        between = self._between.get(key)
        if between is not None and plan.program.between_bytes < between.peak_bytes:
            return False
        return resident + plan.timeline.above_bytes <= plan.budget_bytes

    # -- what is learned from a first step ------------------------------------------------------------------

    def _learn_between(self, key: object, peak_bytes: int, left_bytes: int) -> None:
        """What user code took between the two graphs of ``key``'s step."""
        step = self.steps.get(key)
        plan = step.plan if step is not None else None
        if plan is None:
            return
        tangents = plan.program.late_bytes - plan.program.held_bytes
        self._note(key, _Between(peak_bytes, max(left_bytes - tangents, 0)))
        total = plan.resident_bytes + plan.boundary_bytes + peak_bytes
        if total > plan.budget_bytes:
            warnings.warn(
                f"code outside the model took {format_bytes(peak_bytes)} between forward and backward, so this first "
                f"step took {format_bytes(total)}, over its budget of {format_bytes(plan.budget_bytes)}; "
                "from the next step on it is planned for",
                stacklevel=2,
            )

    def _learn_overlap(self, step: CompiledStep) -> None:
        """``step`` ran its forward while others were in flight: their plans are to leave room for all of it."""
        plan = step.plan
        assert plan is not None
        for key in self.steps:
            self._note(key, _Between(plan.timeline.above_bytes, plan.boundary_bytes))

    def _note(self, key: object, found: _Between) -> None:
        known = self._between.setdefault(key, found)
        self._between[key] = _Between(max(known.peak_bytes, found.peak_bytes), max(known.held_bytes, found.held_bytes))

    # -- planning -------------------------------------------------------------------------------------------

    def _plan(
        self,
        model: weakref.ref[torch.nn.Module],
        key: object,
        device: str,
        resident: int,
        flying: int,
        joint: Joint,
    ) -> Plan:
        """The plan for a captured step. Nothing of the model has run when this returns or raises."""
        module = model()
        assert module is not None
        reserve = reserve_bytes(module, device, verify=self.verify)
        if self.optimizer is not None:
            resident += future_state_bytes(self.optimizer)
        if self.given_plan is not None:
            return _given(self.given_plan, joint.program, device_context(device), resident, reserve)
        options = self.options
        options.progress(Progress(f"profiling its {len(joint.program.ops)} ops"))
        program = with_measured_costs(joint.program, joint.calls, device)
        between, loss_outside = self._between.get(key), False
        if between is not None and not flying:
            program = replace(program, between_bytes=between.peak_bytes, held_bytes=between.held_bytes)
        elif loss_outside := loss_is_outside(joint):
            # Nobody knows yet what the loss takes: this step leaves it all the room that there is.
            options = replace(options, planner="least_memory")
        earlier = [step.plan for step in self.steps.values() if step.plan is not None]
        seeds = [plan.schedule for plan in earlier if plan.program.fingerprint == program.fingerprint]
        make = functools.partial(make_plan, program, self.budget, reserve_bytes=reserve, seeds=seeds)
        try:
            return make(resident_bytes=resident, options=options)
        except BudgetError as error:
            if loss_outside:
                error.add_note(
                    "The loss outside the model is not in these figures: the first step measures what it takes. "
                    "Leave room for it above smallest_bytes"
                )
            if not flying:
                raise
            # The forward in flight was planned without knowing of this one. The next round knows (_learn_overlap).
            return make(resident_bytes=resident - flying, options=replace(options, planner="least_memory"))


def _key(module: torch.nn.Module, device: str, args: Any, kwargs: Any) -> object:
    """What a plan depends on besides the model: arguments, modes, autocast, threads."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    parts: list[object] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
        else:
            parts.append((type(leaf).__qualname__, repr(leaf)))
    return (tuple(parts), str(spec), _modes(module, device))


def _modes(module: torch.nn.Module, device: str) -> object:
    autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return (module.training, *autocast, torch.get_num_threads())


def _given(plan: Plan, program: Program, context: dict[str, str], resident: int, reserve: int) -> Plan:
    """The user's plan, if it is of this program and fits."""
    differences = [
        f"{key}: plan {plan.provenance.get(key)!r}, here {value!r}"
        for key, value in context.items()
        if key in ("device", "torch") and plan.provenance.get(key) != value
    ]
    if not is_measured_form(plan.program, program):
        differences.append(_program_difference(plan, program))
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


def _program_difference(plan: Plan, ours: Program) -> str:
    theirs = plan.program
    if len(ours.ops) != len(theirs.ops):
        return f"program: the plan's has {len(theirs.ops)} ops, this one {len(ours.ops)}"
    for a, b in zip(ours.ops, theirs.ops, strict=True):
        if (a.target, a.views) != (b.target, b.views):
            return f"program: the plan's has {b.target}{b.views} where this one has {a.target}{a.views}"
        if a.signature != b.signature:
            return f"program: the plan's has {a.signature} where this one has {b.signature}"
    return "program: buffers differ in size"
