"""``verify``: whole steps compared bit by bit, planned against captured order and against eager."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ebbtide._api.refusals import refuse_to_fit, require_call, require_module
from ebbtide.capture.joint import Captured
from ebbtide.capture.layouts import Layouts
from ebbtide.capture.loss import guarded
from ebbtide.capture.trace import forward_of
from ebbtide.cost.attach import is_measured_form
from ebbtide.engine.compiled import Call, Capture
from ebbtide.engine.executable import executable_of
from ebbtide.engine.pending_steps import PendingStep, PendingSteps
from ebbtide.engine.snapshot import snapshot
from ebbtide.engine.tangent_layouts import TangentLayouts
from ebbtide.engine.validity import Validity
from ebbtide.entry_points import options_of, takes_options
from ebbtide.errors import PlanMismatch, UsageError
from ebbtide.measurement.device import on_device_of
from ebbtide.measurement.libraries import take_workspaces
from ebbtide.measurement.peak import measure
from ebbtide.measurement.resident import device_of
from ebbtide.options import Options
from ebbtide.report.plan import Plan
from ebbtide.report.records.curve import Curve, Marks, curve_of
from ebbtide.report.records.points import Measured
from ebbtide.rewrites.choices import apply_held, apply_proven, choice_of
from ebbtide.step.program import Program
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide.tiers import parse_tiers
from ebbtide.torch_seams import trees as pytree
from ebbtide.transfers.tiers import open_tiers
from ebbtide.units import format_bytes

__all__ = ["Verification", "Verifier", "verify"]

_SHOWN = 3
"""Of what differs, how much a text names."""


@dataclass(frozen=True)
class Verification:
    """What three steps from the same state gave: planned, captured order, eager.

    Attributes:
        differences: where planned and captured order differ in a bit; empty is what Ebbtide promises.
        eager_differences: where planned and eager differ (capture itself may reorder sums in a few models).
        predicted_above_bytes: the plan's peak above the step's start.
        measured_above_bytes: the planned step's, as the allocator counted it.
        baseline_above_bytes: the unplanned step's measured peak above its start.
        eager_above_bytes: eager's.
        budget_above_bytes: what the budget allows above the start.
        measured: the three steps' peaks and, on CPU, memory over them, for ``Plan.save_html``.
    """

    differences: tuple[str, ...]
    eager_differences: tuple[str, ...]
    predicted_above_bytes: int
    measured_above_bytes: int
    baseline_above_bytes: int
    eager_above_bytes: int
    budget_above_bytes: int
    measured: tuple[Measured, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether outputs, gradients, buffers and random state are bit-equal to captured order's."""
        return not self.differences

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak is within the budget."""
        return self.measured_above_bytes <= self.budget_above_bytes

    @property
    def prediction_error(self) -> float:
        """Predicted over measured bytes above the start, minus one."""
        return self.predicted_above_bytes / self.measured_above_bytes - 1 if self.measured_above_bytes else 0.0

    def __str__(self) -> str:
        lines = [
            f"{'bit-equal to' if not differ else 'OTHER BITS than'} {what}{_named(differ)}"
            for what, differ in (("captured order", self.differences), ("eager", self.eager_differences))
        ]
        levels = [format_bytes(each) for each in (self.predicted_above_bytes, self.measured_above_bytes)]
        within = "within the budget" if self.within_budget else "ABOVE THE BUDGET"
        lines.append(f"peak above the start {levels[1]}, predicted {levels[0]}, {within}")
        others = [format_bytes(each) for each in (self.baseline_above_bytes, self.eager_above_bytes)]
        return "\n".join([*lines, f"unplanned {others[0]}, eager {others[1]}"])


def _named(differences: Sequence[str]) -> str:
    """The first of them."""
    if not differences:
        return ""
    more = len(differences) - _SHOWN
    return f": {', '.join(differences[:_SHOWN])}{f' and {more} more' if more > 0 else ''}"


@dataclass(frozen=True)
class _Result:
    tensors: dict[str, torch.Tensor]
    above_bytes: int
    curve: Curve | None
    """Above the start."""

    def measured(self, label: str, resident_bytes: int) -> Measured:
        """For a report of a plan, whose resident part it is given."""
        curve = None if self.curve is None else self.curve.above(resident_bytes)
        return Measured(label, resident_bytes + self.above_bytes, curve=curve)


@takes_options
def verify(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    *,
    options: Options | None = None,
) -> Verification:
    """Run one step planned, one in captured order and one eager, from the same state, and compare every bit.

    Buffers, arguments, gradients and random state are put back afterwards. All three steps have to fit.

    Args:
        model: whose call ``plan`` was made for; not fitted.
        args: positional arguments of the call.
        kwargs: keyword arguments.
        plan: from :func:`ebbtide.plan`; best given by name, ``verify(model, args, plan=plan)``.
        options: ``gradients`` (the backward starts with ones from all outputs that take them), and ``tiers``, by
            default those of the plan, where their names say.

    Raises:
        UsageError: for a model, arguments, plan or options that are none.
        TierError: if a tier of the plan cannot be used.
        PlanMismatch: if the plan is of another program.
    """
    require_module(model, "verify")
    require_call(model, args, kwargs)
    asked = options_of("verify", options)
    if not isinstance(plan, Plan):
        raise UsageError(
            f"verify takes a Plan, not {type(plan).__name__}: make one with ebbtide.plan and give it by name, "
            "verify(model, args, plan=plan)",
            argument="plan",
            value=plan,
        )
    refuse_to_fit(model)
    return Verifier(model, args, kwargs, options=asked).check(plan)


class Verifier:
    """Checks any number of plans of one call; the eager and the captured step are run once.

    Args:
        model: not fitted.
        args: positional arguments of the call.
        kwargs: keyword arguments.
        options: as for :func:`verify`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        options: Options | None = None,
    ) -> None:
        options = options or Options()
        self._model = model
        self._tiers = parse_tiers(options.tiers)
        self._args = args
        self._kwargs = dict(kwargs or {})
        self._device = device_of([model, args])
        self._every_output = options.every_output
        forward = forward_of(model)
        self._call = Call(model, forward, self._args, self._kwargs, self._device, self._every_output)
        self._capture = Capture(device=self._device, name=type(model).__name__)
        self._eager: _Result | None = None
        self._captured: tuple[str, _Result] | None = None

    def check(self, plan: Plan) -> Verification:
        """One step of ``plan`` against captured order and eager, from the state that the model has now.

        Raises:
            PlanMismatch: if the plan is of another program.
        """
        with on_device_of([self._model, self._args]):
            return self._checked(plan)

    def _checked(self, plan: Plan) -> Verification:
        forward = forward_of(self._model)
        state = _State(self._model, (self._args, self._kwargs), self._device)
        try:
            if self._eager is None:
                self._eager = self._run(state, lambda: forward(self._model, *self._args, **self._kwargs))
            program = self._program_of(plan)
            if self._captured is None or self._captured[0] != program.fingerprint:
                in_order = replace(plan, program=program, schedule=unplanned_schedule(program), rewritten=None)
                self._captured = (program.fingerprint, self._run_planned(state, in_order))
            planned = self._run_planned(state, plan)
        finally:
            state.restore()
        _, captured = self._captured
        return Verification(
            differences=_differences(planned, captured),
            eager_differences=_differences(planned, self._eager),
            predicted_above_bytes=plan.timeline.above_bytes,
            measured_above_bytes=planned.above_bytes,
            baseline_above_bytes=captured.above_bytes,
            eager_above_bytes=self._eager.above_bytes,
            budget_above_bytes=plan.budget_bytes - plan.resident_bytes,
            measured=(
                planned.measured("planned", plan.resident_bytes),
                captured.measured("unplanned", plan.resident_bytes),
                self._eager.measured("eager", plan.resident_bytes),
            ),
        )

    def _run_planned(self, state: _State, plan: Plan) -> _Result:
        tiers = open_tiers(self._tiers or parse_tiers(list(plan.tiers)), self._device)
        resting_on = Validity(
            request=0, tentative=False, accumulates=False, updates=False, settings=(), moves=plan.schedule.moves
        )
        step = self._step(plan)

        def traced_again(layouts: Layouts) -> Captured:
            again = self._capture.traced_again(self._as_captured(), layouts)
            return again if plan.rewritten is None else apply_held(again, plan.rewritten.rewrites, self._device)

        executable = executable_of(
            step,
            plan,
            resting_on,
            device=self._device,
            verify=False,
            tiers=tiers,
            layouts=TangentLayouts(
                first=tuple(node.meta["val"] for node in step.tangents),
                device=self._device,
                captured=step,
                plan=plan,
                traced_again=traced_again,
                learn=lambda _: None,
            ),
        )
        pending_steps = PendingSteps()

        def call() -> Any:
            pending = PendingStep(executable, pending_steps)
            outputs, detached = self._capture(self._call, pending)
            pending.register(outputs)
            return guarded(outputs, detached)[0]

        self._run(state, call)  # sets up kernels
        return self._run(state, call)

    def _program_of(self, plan: Plan) -> Program:
        """The captured step's program, which is that of ``plan`` but where the plan is of a rewritten one."""
        return plan.program if plan.rewritten is None else self._as_captured().program

    def _as_captured(self) -> Captured:
        """The step, captured once for all plans."""
        if not self._capture.is_made:
            self._capture.inputs_of(self._call, PendingStep(None, PendingSteps()))
        return self._capture.at(())

    def _step(self, plan: Plan) -> Captured:
        """The step of ``plan``: as captured, or rewritten.

        Raises:
            PlanMismatch: if the plan is of another program.
        """
        captured = source = self._as_captured()
        if plan.rewritten is not None:
            try:
                choice_of(source, plan.rewritten.rewrites)
            except LookupError as error:
                raise PlanMismatch(
                    f"the plan for {plan.case} is of another program than this call: {error}", differences=[str(error)]
                ) from None
            captured, _ = apply_proven(source, plan.rewritten.rewrites)
        if not is_measured_form(plan.program, captured.program):
            raise PlanMismatch(
                f"the plan for {plan.case} is of another program than this call; plan anew", differences=["program"]
            )
        return captured

    def _run(self, state: _State, call: Callable[[], Any]) -> _Result:
        model = self._model
        state.start()
        if self._device == "cuda":
            take_workspaces()
        with measure(model) as gauge:
            begin = time.time_ns()
            outputs = call()
            boundary = time.time_ns()
            roots = _roots(outputs, self._every_output)
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
            marks = Marks(begin, boundary, time.time_ns())
        tensors = {f"output {i}": t.detach().clone() for i, t in enumerate(_tensors(outputs))}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                tensors[f"gradient of {name}"] = parameter.grad.detach().clone()
        tensors.update({f"buffer {name}": b.detach().clone() for name, b in model.named_buffers()})
        tensors["random state"] = torch.cuda.get_rng_state() if self._device == "cuda" else torch.get_rng_state()
        return _Result(tensors, gauge.above_bytes, curve_of(gauge.events, marks, 0))


class _State:
    """Buffers, arguments, gradients and random state, to start every run from and to put back at the end."""

    def __init__(self, model: torch.nn.Module, arguments: object, device: str) -> None:
        self._put_back = snapshot([*model.buffers(), *_tensors(arguments)], device)
        self._gradients = [(p, p.grad) for p in model.parameters()]

    def start(self) -> None:
        """The state before a step, without gradients."""
        self._put_back()
        for parameter, _ in self._gradients:
            parameter.grad = None

    def restore(self) -> None:
        """The state as it was found."""
        self._put_back()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


def _roots(outputs: object, every_output: bool) -> list[torch.Tensor]:
    """What a backward starts from: the scalars where there are any, else all that requires a gradient."""
    found = [t for t in _tensors(outputs) if t.requires_grad]
    return [t for t in found if t.numel() == 1 and not every_output] or found


def _tensors(outputs: object) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]


def _differences(a: _Result, b: _Result) -> tuple[str, ...]:
    names = sorted(a.tensors.keys() | b.tensors.keys())
    return tuple(name for name in names if not _same_bits(a.tensors.get(name), b.tensors.get(name)))


def _same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(left, right)
