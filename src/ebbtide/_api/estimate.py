"""``plan`` and ``sweep``: what a step would take under a budget, before anything runs; no GPU and no memory needed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch

from ebbtide._api.auto_budget import AUTO, budget_from
from ebbtide._api.refusals import (
    refuse_to_offload,
    refuse_to_plan,
    refuse_to_step_inside,
    require_call,
    require_module,
)
from ebbtide.capture.cuda.notes import ops_as_on_cuda, workspace_on_cuda
from ebbtide.capture.few_layers import repeated_layers
from ebbtide.capture.joint import Captured
from ebbtide.capture.loss import loss_is_outside
from ebbtide.capture.offline import capture
from ebbtide.checks import text
from ebbtide.cost.attach import costs_of, with_measured_costs, with_roofline_costs
from ebbtide.cost.cache import device_context
from ebbtide.cost.cuda_workspace import cublas_bytes, cublas_bytes_here, has_product
from ebbtide.engine.gradient_watcher import own_backwards
from ebbtide.engine.reserve import reserve_bytes, unsplit_bytes
from ebbtide.engine.traced_graph import ALLOCATOR_GRANULARITY_BYTES
from ebbtide.entry_points import options_of, takes_options
from ebbtide.errors import UsageError
from ebbtide.faults import own_faults, users_level
from ebbtide.measurement.device import on_device_of
from ebbtide.measurement.libraries import take_workspaces
from ebbtide.measurement.resident import device_of, resident_parts
from ebbtide.optimizer.cost.forecast import ahead_in_place, ahead_offloaded
from ebbtide.optimizer.in_step.insertion import UpdateInsertion
from ebbtide.optimizer.state.combined import class_names
from ebbtide.options import Options
from ebbtide.planners import Progress, planner_named
from ebbtide.planners.narration import interruption_noted, narrated
from ebbtide.planning.alternatives import Alternatives
from ebbtide.planning.frontier import frontier
from ebbtide.planning.more_layers import grown_alternatives
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.planning.step_end import NOTHING_AFTER, StepEnd
from ebbtide.report.frontier import Frontier
from ebbtide.report.plan import Plan
from ebbtide.rewrites.choices import (
    Finish,
    alternatives_of,
    itself,
    left_of,
    measure_ahead,
)
from ebbtide.step.layers import Layers, grown_program
from ebbtide.step.machine import Machine, is_elsewhere
from ebbtide.step.program import Program
from ebbtide.step.provenance import Costs, LossPlace, Provenance
from ebbtide.step.refusal import Refusal
from ebbtide.step.resident_in_words import OPTIMIZER_STATE
from ebbtide.step.schedule import Schedule
from ebbtide.tiers import parse_tiers
from ebbtide.transfers.links import machine_with_tiers
from ebbtide.units import Budget, format_bytes

FEW_LAYERS, MORE_LAYERS = 3, 5
"""Of many that are alike, how many are captured (``step.layers``, definition 3)."""

__all__ = ["AheadStep", "capture_ahead", "capture_program", "plan", "sweep"]


@takes_options
def plan(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: str | int | Budget = AUTO,
    machine: str | Machine | None = None,
    loss: Callable[[Any], Any] | None = None,
    name: str = "",
    options: Options | None = None,
) -> Plan:
    """Plan one training call of ``model`` under ``budget``; nothing of the model runs.

    Args:
        model: real, fake (built under ``FakeTensorMode``) or on the ``meta`` device.
        args: positional arguments of the call, real, fake or meta like the model.
        kwargs: keyword arguments.
        budget: bytes of the step's peak, resident part included, or a share of the unplanned peak; ``"auto"`` is what
            can be used of the machine.
        machine: as in :class:`Options`.
        loss: as in :class:`Options`.
        name: of the case, for reports; the model's class if empty.
        options: all else.

    Raises:
        UsageError: for an argument that is none of what is said above, naming it and what it takes.
        CaptureError: if the call is not one graph.
        TierError: for a disk that cannot be used.
        BudgetError: if the budget is below what is workable.
    """
    text("name", name)
    asked = options_of("plan", options, machine=machine, loss=loss)
    parsed = budget_from(budget, [model], asked.target)
    planner_named(asked.planner)
    with narrated(asked.tell), interruption_noted(asked.tell) as tell:
        asked = replace(asked, progress=tell)
        ahead = capture_ahead(model, args, kwargs, options=asked, name=name)
        return ahead.plan(parsed, PlanningOptions.of(asked))


@takes_options
def sweep(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budgets: Sequence[str | int | Budget],
    planners: Sequence[str] = ("auto",),
    machine: str | Machine | None = None,
    loss: Callable[[Any], Any] | None = None,
    name: str = "",
    options: Options | None = None,
) -> Frontier:
    """The memory/time frontier of one training call: a plan per budget and planner, from one capture.

    A planner's overhead never rises with the budget: each budget is planned from the plan of the next smaller one
    as well. Budgets below what is workable have no plan in the list; a warning names them, and ``refusals`` has them.

    Args:
        model: as for :func:`plan`.
        args: positional arguments of the call.
        kwargs: keyword arguments.
        budgets: each as for :func:`plan`.
        planners: names of planners, with their settings if they take any.
        machine: as in :class:`Options`.
        loss: as in :class:`Options`.
        name: of the case, for reports.
        options: all else; effort and time limit are of each plan, and an interrupt that is set makes each plan that is
            left the best at hand.

    Returns:
        The plans, ascending by budget, within one budget in the order of ``planners``: a list, whose ``refusals`` are
        the budgets and planners that have none, with the reason. Printed, it is a table of both.

    Raises:
        UsageError: for an argument that is none of what is said above, naming it and what it takes.
        CaptureError: if the call is not one graph.
        BudgetError: if no budget is workable.
    """
    text("name", name)
    asked = options_of("sweep", options, machine=machine, loss=loss)
    parsed = [Budget.parse(budget) for budget in _several("budgets", budgets)]
    names = _several("planners", planners)
    for each in names:
        planner_named(each)
        asked.require_tiers_for(each)
    with narrated(asked.tell), interruption_noted(asked.tell) as tell:
        asked = replace(asked, progress=tell)
        ahead = capture_ahead(model, args, kwargs, options=asked, name=name)
        plans = Frontier(ahead.frontier(parsed, names, PlanningOptions.of(asked)))
    if plans.refusals and not plans:
        raise plans.refusals[-1].error
    if said := plans.left_out():
        warnings.warn(f"sweep has no plan by {said}", stacklevel=users_level())
    return plans


@dataclass(frozen=True)
class AheadStep:
    """A captured training call with all that plans for it need.

    Attributes:
        program: with costs.
        resident_bytes: at a step's start, optimizer state that is to come among them.
        reserve_bytes: kept free inside every budget.
        machine: planned for; ``None`` is the device at hand.
        tiers: of it, that buffers may be moved to.
        provenance: where costs are from, for the plans.
        end: what is taken when the backward has returned, whatever the plan.
        resident: what ``resident_bytes`` are made of, by kind; empty where that is not known.
        layer_types: the class of each of the model's modules, by its path; likewise.
        alternatives: to the program; ``None`` where none are asked for.
        skipped: where something looks as if it could be rewritten, and why it is left.
        measure_facts: finds out what its rewrites rest on, and keeps it for later; in words, and whether it holds.
    """

    program: Program
    resident_bytes: int
    reserve_bytes: int
    machine: Machine | None = None
    tiers: tuple[str, ...] = ()
    provenance: Provenance = field(default_factory=Provenance)
    end: StepEnd = NOTHING_AFTER
    resident: Mapping[str, int] = field(default_factory=dict[str, int])
    layer_types: Mapping[str, str] = field(default_factory=dict[str, str])
    alternatives: Alternatives | None = None
    skipped: Sequence[tuple[str, str]] = ()
    measure_facts: Callable[[], Iterator[tuple[str, bool | None]]] = lambda: iter(())

    @property
    def unplanned_budget_bytes(self) -> int:
        """The budget within which the step runs unplanned, the reserve included."""
        return self.reserve_bytes + self.end.unplanned_bytes(self.program, self.resident_bytes)

    def plan(self, budget: Budget, options: PlanningOptions, seeds: Sequence[Schedule] = ()) -> Plan:
        """The plan within ``budget``; raises as :func:`~ebbtide.planning.pipeline.make_plan` does, and starts so."""
        with own_faults():
            return make_plan(
                self.program,
                budget,
                resident_bytes=self.resident_bytes,
                reserve_bytes=self.reserve_bytes,
                end=self.end,
                seeds=seeds,
                options=self._options(options),
            )

    def frontier(
        self, budgets: Sequence[Budget], planners: Sequence[str], options: PlanningOptions
    ) -> Iterator[Plan | Refusal]:
        """A plan or a refusal per budget and planner (:func:`~ebbtide.planning.frontier.frontier`)."""
        with own_faults():
            yield from frontier(
                self.program,
                budgets,
                planners,
                resident_bytes=self.resident_bytes,
                reserve_bytes=self.reserve_bytes,
                end=self.end,
                options=self._options(options),
            )

    def _options(self, options: PlanningOptions) -> PlanningOptions:
        return replace(
            options,
            machine=self.machine,
            tiers=self.tiers,
            provenance=self.provenance,
            resident_parts={kind: size for kind, size in self.resident.items() if size},
            alternatives=self.alternatives,
        )


def capture_ahead(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Options | None = None,
    name: str = "",
) -> AheadStep:
    """Capture one training call and its costs.

    Args:
        model: as for :func:`plan`.
        args: positional arguments of the call.
        kwargs: keyword arguments.
        options: what the step is and for which machine.
        name: of the case, for reports.

    Raises:
        UsageError: for a model or arguments that are none, or that are on no device that can be planned for.
        CaptureError: if the call is not one graph.
    """
    options = options or Options()
    require_module(model, "plan")
    options.require_complete()
    require_call(model, args, kwargs)
    refuse_to_plan(model, (args, kwargs))
    target, progress, optimizer = options.target, options.tell, options.optimizer_of(model)
    if options.offload_optimizer:
        refuse_to_offload(optimizer, parse_tiers(options.tiers))
    begin: Finish = itself
    finish: Finish = itself
    if options.inside:
        refuse_to_step_inside(optimizer)
        assert optimizer is not None
        device_type = None if target is None else target.device
        insertion = UpdateInsertion(optimizer, model, device_type, options.max_norm)
        begin, finish = insertion.with_norms, insertion.with_updates
    progress(Progress("capturing the step" if is_elsewhere(target) else "capturing and profiling the step"))
    with on_device_of([model, args, kwargs]):

        def captured() -> _Ahead:
            joint, program, provenance = capture_program(
                model,
                tuple(args),
                kwargs or {},
                machine=target,
                loss=options.loss,
                every_output=options.every_output,
                name=name,
                begin=begin,
                finish=finish,
            )
            device = program.context["device"] if target is None else target.device
            alternatives = _alternatives(joint, program, device, options, finish) if options.rewrite_rules else None
            return _Ahead(joint, program, provenance, alternatives)

        ahead = None
        if target is not None and is_elsewhere(target) and not options.inside:
            ahead = _by_few_layers(model, target, captured)
        ahead = ahead or captured()
        joint, program, provenance, alternatives = ahead.joint, ahead.program, ahead.provenance, ahead.alternatives
        device = program.context["device"] if target is None else target.device
        granularity = target.granularity_bytes if target is not None else ALLOCATOR_GRANULARITY_BYTES[device]
        planned_for, tiers = machine_with_tiers(target, parse_tiers(options.tiers), device)
        if options.offload_optimizer and optimizer is not None:
            state = ahead_offloaded(optimizer, [model, args, kwargs], device, tiers[0])
        else:
            state = ahead_in_place(optimizer, device, in_backward=options.inside)
        reserve = reserve_bytes(program, device, verify=options.verify)
        held = 0
        if target is not None and target.device == "cuda":
            held = cublas_bytes(program, target)
        elif device == "cuda" and has_product(program):
            with own_backwards():
                take_workspaces()
            held = cublas_bytes_here()
        if target is None and device == "cuda":
            reserve += unsplit_bytes(program)
    resident = resident_parts(model, (args, kwargs), state.staying, granularity)
    resident[OPTIMIZER_STATE] += state.to_come_bytes
    return AheadStep(
        program,
        sum(resident.values()) + held,
        reserve,
        planned_for,
        tiers,
        replace(
            provenance,
            optimizer="" if optimizer is None else class_names(optimizer),
            offloaded=state.note,
            optimizer_step=state.step_word,
        ),
        state.end,
        {**resident, "cuBLAS workspace": held},
        _classes_in(model),
        alternatives,
        left_of(joint, options.rewrite_rules),
        (lambda: iter(())) if is_elsewhere(target) else partial(measure_ahead, joint, device, options.rewrite_rules),
    )


@dataclass(frozen=True)
class _Ahead:
    """A captured step; the attributes are those of :class:`AheadStep`, and ``joint`` the graph that they come from."""

    joint: Captured
    program: Program
    provenance: Provenance
    alternatives: Alternatives | None


def _by_few_layers(model: torch.nn.Module, machine: Machine, captured: Callable[[], _Ahead]) -> _Ahead | None:
    """The step of a model with many layers alike, captured with few; ``None`` where that does not go on regularly."""
    repeated = repeated_layers(model)
    if repeated is None:
        return None
    layers = Layers(FEW_LAYERS, MORE_LAYERS, repeated.count)
    try:
        with repeated.first(layers.few):
            few = captured()
            trained = sum(each.requires_grad for each in model.parameters())
        with repeated.first(layers.more):
            more = captured()
    except Exception:  # of code that counts on all layers: captured as a whole, it tells of itself
        return None
    gradients = few.joint.outputs[few.joint.forward_output_count :]
    if sum(each is not None for each in gradients) < trained:  # something may be read behind a later layer alone
        return None
    if (program := grown_program(few.program, more.program, layers)) is None:
        return None
    alternatives = None
    if few.alternatives is not None and more.alternatives is not None:

        def whole() -> Alternatives:
            with on_device_of([model]):
                found = captured().alternatives
            assert found is not None
            return found

        alternatives = grown_alternatives(few.alternatives, more.alternatives, layers, program, whole)
    provenance = replace(
        more.provenance,
        estimate=_as_captured(program.context["device"], f", {layers.more} of {layers.all} layers"),
        mapped=more.provenance.mapped and ops_as_on_cuda(program, machine),
        workspace=more.provenance.workspace and workspace_on_cuda(program, machine),
    )
    return _Ahead(more.joint, program, provenance, alternatives)


def _as_captured(device: str, part: str = "") -> str:
    """What stands in a plan for a machine that is not at hand: where it was captured, and if not all, what part."""
    return f"captured on {device}{part}; fit re-captures on the real device"


def _alternatives(joint: Captured, program: Program, device: str, options: Options, finish: Finish) -> Alternatives:
    rules, first = options.rewrite_rules, options.first_rules
    where = None if is_elsewhere(options.target) else device
    return alternatives_of(joint, program, where, rules=rules, first=first, finish=finish)


def _classes_in(model: torch.nn.Module) -> dict[str, str]:
    """The class of each module by its path, of one that is in several places by each."""
    named = cast("Iterable[tuple[str, object]]", model.named_modules(remove_duplicate=False))
    return {path: type(module).__name__ for path, module in named}


def _usable(machine: Machine) -> str:
    """What is taken off the memory of ``machine``, with sources; empty if nothing is."""
    if not machine.memory_bytes or machine.usable_bytes == machine.memory_bytes:
        return ""
    source = machine.sources.get
    return (
        f"less {format_bytes(machine.context_bytes)} for the device's context ({source('context_bytes', 'as given')}), "
        f"and {machine.fragmentation:.0%} of the rest for fragmentation ({source('fragmentation', 'as given')})"
    )


def _several(argument: str, values: object) -> Sequence[Any]:
    """The elements of ``values``, one or more; a string is one value and not a sequence of them."""
    if isinstance(values, str | bytes | Budget) or not isinstance(values, Iterable):
        raise UsageError(
            f"{argument}={values!r} is one value; {argument} takes a sequence of them: {argument}=({values!r},)",
            argument=argument,
            value=values,
        )
    several = list(cast("Iterable[Any]", values))
    if not several:
        raise UsageError(f"{argument} is empty; give one or more", argument=argument, value=several)
    return several


def capture_program(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    machine: Machine | None = None,
    loss: Callable[[Any], Any] | None = None,
    every_output: bool = False,
    name: str = "",
    begin: Finish = itself,
    finish: Finish = itself,
) -> tuple[Captured, Program, Provenance]:
    """One training call as captured, its program with costs, and facts on where the costs are from.

    Args:
        model: real, fake or on ``meta``.
        args: positional arguments of the call.
        kwargs: keyword arguments.
        machine: of the catalogue; ``None`` or the one named ``cpu`` is the device at hand.
        loss: applied to what the model returns, as part of the step.
        every_output: whether outputs beside a scalar loss take gradients too.
        name: of the case; the model's class if empty.
        begin: gives the step that is rewritten for the captured one.
        finish: gives the step that is to be planned for that.

    Raises:
        CaptureError: if the call is not one graph.
    """
    device = device_of([model, args]).replace("meta", "cpu")
    # Tensors that are on the device planned for are traced as they are.
    cuda = machine.compute_capability if machine is not None and device == "cpu" and machine.device == "cuda" else None
    context = device_context(device)
    granularity = machine.granularity_bytes if machine is not None else ALLOCATOR_GRANULARITY_BYTES[device]
    joint = capture(
        model,
        args,
        kwargs,
        name=name or type(model).__name__,
        granularity_bytes=granularity,
        context=context,
        loss=loss,
        every_output=every_output,
        here=not is_elsewhere(machine),
        cuda=cuda,
    )
    joint = begin(joint)
    finished = finish(joint)
    loss_place = LossPlace.OUTSIDE if loss_is_outside(joint) else None
    if not is_elsewhere(machine):
        program = with_measured_costs(finished.program, finished.calls, device)
        costs, estimated = costs_of(joint.calls, device)
        return joint, program, Provenance(machine=device, costs=costs, estimate=estimated, loss=loss_place)
    assert machine is not None
    provenance = Provenance(
        machine=machine.name,
        costs=Costs.ROOFLINE,
        memory_bytes=machine.memory_bytes or None,
        usable_bytes=machine.usable_bytes if machine.memory_bytes else None,
        usable=_usable(machine),
        estimate=_as_captured(device),
        mapped=ops_as_on_cuda(joint.program, machine) if cuda is not None else "",
        workspace=workspace_on_cuda(joint.program, machine) if cuda is not None else "",
        loss=loss_place,
    )
    return joint, with_roofline_costs(finished.program, finished.calls, machine), provenance
