"""Which plan a call runs under: one of its step's that holds, or a new one for what surrounds it now.

1. A plan *holds* while what is resident leaves room for it and nothing else has been learned about what happens between
   its two graphs and after them; otherwise another is made for the same capture.
2. A plan is a *guess* while something that it depends on is not known: what a loss outside takes, or a forward that it
   was not planned with. It holds until that is known.
3. A budget that is a share of the unplanned peak *grants* every shape of the model what it has granted any.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ebbtide.capture.joint import Captured
from ebbtide.capture.loss import loss_is_outside
from ebbtide.cost.attach import costs_of
from ebbtide.cost.cache import device_context
from ebbtide.engine.after import hooks_end
from ebbtide.engine.between import Between
from ebbtide.engine.circumstances import Circumstances
from ebbtide.engine.compiled import ALLOCATOR_GRANULARITY_BYTES
from ebbtide.engine.executable import Executable
from ebbtide.engine.flights import flights_of
from ebbtide.engine.given import given_plan_here, program_of, start_here
from ebbtide.engine.model import FittedModel
from ebbtide.engine.reserve import reserve_bytes, unsplit_bytes
from ebbtide.engine.resident_by_kind import GRADIENTS_TO_COME, STATE, resident_by_kind, without_flights
from ebbtide.engine.retained import Retained, plan_retained
from ebbtide.engine.step import Step
from ebbtide.errors import BudgetError, CaptureError
from ebbtide.faults import users_level
from ebbtide.measurement.resident import gradients_to_come, stepping
from ebbtide.optimizer.cost.step_end import taken_of
from ebbtide.optimizer.cost.update_costs import settings_of
from ebbtide.optimizer.offload.budgeted_offload import offload_hint
from ebbtide.optimizer.state.combined import class_names, parts_of
from ebbtide.optimizer.state.future_bytes import future_state_bytes
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planning.alternatives import Alternative
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.planning.step_end import StepEnd, most_of
from ebbtide.report.plan import Plan
from ebbtide.rewrites.choices import alternatives_here, itself
from ebbtide.step.program import Program
from ebbtide.step.provenance import IN_THE_STEP, LossPlace
from ebbtide.step.schedule import Schedule
from ebbtide.units import Budget, format_bytes

_ASKED = "the questions that the model asks of values of its inputs"
_ASK_OUTSIDE = "ask it outside of the model and give the forward what comes of it as a Python bool"

__all__ = ["holding", "is_guess", "plan_for", "resident_bytes"]


def holding(model: FittedModel, step: Step, now: Circumstances) -> Executable | None:
    """Of the plans of ``step`` that hold the one of least overhead; ``None`` if none does (definition 1).

    A checkpoint compares what a repeated forward saves with what the first one did, so while one of a step's forwards
    is in flight under saved-tensor hooks, its plan stays, for calls under hooks. Its backward cannot be told which
    forward it belongs to, so no plan that moves buffers holds there.
    """
    if now.checkpointed:
        for each in reversed(step.executables):
            if any(flight.hooked for flight in flights_of(each)):
                return each
    between, retained = model.between.of(now.slot), model.between.retained(now.slot)
    to_come = _state_to_come(model, now)
    resident = resident_bytes(step, now) + to_come
    ends = _ends_of(model, step, now)
    fitting = [
        each
        for each in step.executables
        if each.asked == model.asked
        and _has_room(each, resident + (0 if model.given_plan else each.unsplit_bytes), between, retained)
        and all(end.held_by(each.plan.budget_bytes, each.plan.program, resident) for end in ends)
        and not (each.provisional and not is_guess(model, step, now))
        and (now.accumulating or not each.accumulates)
        and now.updates in each.serves
        and (not now.updates or model.inside is None or each.settings == model.inside.settings)
        and not (each.moves and now.checkpointed)
    ]
    if fitting and model.optimizer is not None and model.stepped_parameters is not None:
        model.stepped_parameters = _stepped_parameters(model.optimizer)
    return min(fitting, key=lambda each: each.overhead) if fitting else None


def plan_for(
    model: FittedModel, step: Step, captured: Captured, program: Program, now: Circumstances, arguments: object
) -> tuple[Plan, bool]:
    """The plan for a captured step with costs, and whether it will do only until more is known (definition 2).

    Forwards that train nothing together with this one are left out where there is no plan with room for them.

    Nothing of the model has run when this returns or raises.

    Args:
        model: whose step it is.
        step: with the plans that it had.
        captured: the step where the model's parameters have gradients or not.
        program: of ``captured``, with costs.
        now: what surrounds the call.
        arguments: of the call.
    """
    reserve = reserve_bytes(program, now.device, verify=model.verify)
    if now.device == "cuda" and model.given_plan is None:  # what its budget leaves free is its maker's choice
        reserve += max([unsplit_bytes(program), *(each.unsplit_bytes for each in step.executables)])
    to_come = _to_come(model, now)
    resident = resident_bytes(step, now) + sum(to_come.values())
    held = resident_by_kind(step, now, arguments, model.optimizers, to_come=to_come, resident_bytes=resident)
    if model.given_plan is not None:
        here = program_of(model.given_plan, captured, program, now.device, _finish(model, now))
        return _given(model, step, model.given_plan, here, now, resident, reserve, held), False
    guess = _waits_for_a_loss(model, step, now)
    end = most_of(_ends_of(model, step, now), program)
    options = replace(_options(model, step, now, guess=guess), resident_parts=held)
    retained = model.between.retained(now.slot)
    if model.rewrites:
        options = replace(
            options,
            alternatives=alternatives_here(
                captured,
                program,
                now.device,
                retained=retained is not None,
                rules=model.rewrites,
                first=model.first_rewrites,
                finish=_finish(model, now),
            ),
        )
    wanted = _Wanted(model, program, now, resident, reserve, end, options)
    between = model.between.of(now.slot)
    if between is None and guess and (likely := model.between.likely(program)) is not None:
        with suppress(BudgetError):  # nobody is refused for what is likely alone
            return wanted.plan(likely), guess
    try:
        plan = wanted.plan(between)
    except BudgetError as error:
        other: tuple[Plan, bool] | None = None
        try:
            other = _instead(wanted, between, error, guess=guess)
        except BudgetError:
            if not model.between.has_untrained(now.slot):
                raise
        if other is not None:
            return other
        if not model.between.forget_untrained(now.slot):
            for note in (*_unknown_here(options.alternatives if model.rewrites else ()), *_untold(model)):
                error.add_note(note)
            raise  # here, with no frame more than it has
    else:
        return plan if retained is None else _with_room_for_retained(wanted, plan, retained), guess
    model.warn_of_untrained()
    return plan_for(model, step, captured, program, now, arguments)


_without_state: weakref.WeakKeyDictionary[torch.optim.Optimizer, object] = weakref.WeakKeyDictionary()
"""Optimizers that have been found to keep nothing, and their options then: a momentum may be warmed up from 0."""


def _state_to_come(model: FittedModel, now: Circumstances) -> int:
    """Bytes of the state that an optimizer will make in its first step: a plan that has no room for it holds no more.

    Asked until there is any state, so that a budget is refused before the weights have changed, and again where it has
    got other parameters since, until a plan with room for their state holds.
    """
    optimizer = model.optimizer
    if optimizer is None or _without_state.get(optimizer, now) == _options_of(optimizer):
        return 0
    if any(any(stepping(each).state.values()) for each in parts_of(optimizer)):
        known, there = model.stepped_parameters, _stepped_parameters(optimizer)
        if known is None:
            model.stepped_parameters = there
        return 0 if known in (None, there) else _to_come(model, now)[STATE]
    found = _to_come(model, now)[STATE]
    if not found:
        _without_state[optimizer] = _options_of(optimizer)
    return found


def _options_of(optimizer: torch.optim.Optimizer) -> object:
    return [settings_of(group) for each in parts_of(optimizer) for group in stepping(each).param_groups]


def _stepped_parameters(optimizer: torch.optim.Optimizer) -> int:
    """How many parameters it has."""
    return sum(len(group["params"]) for each in parts_of(optimizer) for group in stepping(each).param_groups)


def _to_come(model: FittedModel, now: Circumstances) -> dict[str, int]:
    """What a budget has to hold that is not there yet, by kind."""
    found: dict[str, int] = {}
    if model.optimizer is not None:
        away = model.offloaded
        found[STATE] = future_state_bytes(model.optimizer) if away is None else away.resident_to_come_bytes
    if model.gradients_stay:
        granularity = ALLOCATOR_GRANULARITY_BYTES[now.device]
        found[GRADIENTS_TO_COME] = gradients_to_come(now.module, model.optimizer, granularity)
    return found


def _unknown_here(alternatives: Sequence[Alternative]) -> Iterator[str]:
    """What a refusal says of a rewrite that would lower the budget most, where the budget leaves no room to try it."""
    lowest = min(alternatives, key=lambda each: floor_bytes(each.estimated)[0], default=None)
    if lowest is not None and (why := lowest.unknown()):
        yield (
            f"{'; '.join(map(str, lowest.rewrites))} was not tried: {why}. Or make a plan with this budget once in a "
            "process that has room: ebbtide.plan(model, args, budget=...) keeps what it finds out"
        )


def _untold(model: FittedModel) -> Iterator[str]:
    """What a refusal says of optimizers that have come after the first plan."""
    if model.optimizer is None and model.other_optimizers:
        yield (
            f"The state of {_names_of(model.optimizers)} counts since its first step. optimizer= of ebbtide.fit, or "
            "ebbtide.set_optimizer(model, optimizer), tells of it before, so that a budget without room for it is "
            "refused before training"
        )


def _names_of(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    return " and ".join(sorted({class_names(each) for each in optimizers}))


def _finish(model: FittedModel, now: Circumstances) -> Callable[[Captured], Captured]:
    """What is done to a captured step after its rewrites."""
    return model.inside.inside if model.inside is not None and now.updates else itself


def is_guess(model: FittedModel, step: Step, now: Circumstances) -> bool:
    """Whether something that a plan depends on is not known yet (definition 2)."""
    return _waits_for_a_loss(model, step, now) or (bool(now.flying_bytes) and not _was_expected(now))


def resident_bytes(step: Step, now: Circumstances) -> int:
    """What is resident before a call of ``step``; the allocator of a card has its hidden inputs."""
    return now.resident_bytes + (step.hidden_bytes(now.reached) if now.device == "cpu" else 0)


# -- a plan that the user gave ------------------------------------------------------------------------------


def _given(
    model: FittedModel,
    step: Step,
    plan: Plan,
    program: Program,
    now: Circumstances,
    resident: int,
    reserve: int,
    held: Mapping[str, int],
) -> Plan:
    """``plan``, if it is for this step and holds here.

    Raises:
        BudgetError: if what is taken when the backward has returned is over its budget.
        CaptureError: if it moves tensors inside of somebody else's checkpoint.
        PlanMismatch: if it is of another step or machine.
    """
    if plan.schedule.moves and now.checkpointed:
        raise CaptureError(
            "the given plan moves tensors, and this call is inside of a checkpoint or saved-tensor hooks of "
            "somebody else's",
            remedy="take the checkpoint away, which the plan replaces, or plan without tiers",
        )
    given = given_plan_here(plan, program, device_context(now.device), resident, reserve, held)
    end = most_of(_ends_of(model, step, now), program)
    if end.needed_bytes(program, resident) > given.budget_bytes:
        raise end.error(program, resident, given.budget_bytes, resident_parts=held)
    return given


# -- a new plan ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    """What a new plan is to be of.

    Attributes:
        model: whose.
        program: of the captured step, with costs.
        now: what surrounds the call.
        resident_bytes: before it, with what the optimizer will keep.
        reserve_bytes: left free.
        end: what is taken when the backward has returned.
        options: how to plan.
    """

    model: FittedModel
    program: Program
    now: Circumstances
    resident_bytes: int
    reserve_bytes: int
    end: StepEnd
    options: PlanningOptions

    def plan(
        self,
        between: Between | None,
        budget: Budget | None = None,
        *,
        aside_bytes: int = 0,
        seeds: Sequence[Schedule] = (),
    ) -> Plan:
        """A plan with room for what happens ``between`` the graphs, within the model's budget unless another is given.

        Raises:
            BudgetError: if none was found.
        """
        program = self.program
        if between is not None:
            program = replace(program, between_bytes=between.peak_bytes, held_bytes=between.held_bytes)
        return make_plan(
            program,
            self.model.budget if budget is None else budget,
            resident_bytes=self.resident_bytes,
            reserve_bytes=self.reserve_bytes + aside_bytes,
            end=self.end,
            seeds=[*self._seeds(), *seeds],
            options=self.options,
        )

    def _seeds(self) -> list[Schedule]:
        """Schedules of the program that are known, and what the user's start says of it."""
        same = [plan for plan in _plans(self.model) if plan.program.fingerprint == self.program.fingerprint]
        start = self.model.start
        here = [] if start is not None and start.rewritten is not None else start_here(start, self.program)
        return [*(plan.schedule for plan in same), *here]


def _options(model: FittedModel, step: Step, now: Circumstances, *, guess: bool) -> PlanningOptions:
    """How to plan ``step`` in these circumstances, with where its figures come from."""
    costs, estimated = costs_of(step.captured.calls if step.captured else (), now.device)
    source = replace(
        model.options.provenance,
        machine=now.device,
        costs=costs,
        estimate=estimated,
        optimizer=_names_of(model.optimizers),
        offloaded="" if model.offloaded is None else model.offloaded.note,
        optimizer_step=_step_in_words(model, now),
        loss=LossPlace.OUTSIDE if guess else None,
    )
    options = replace(model.options, provenance=source, known=_known(model))
    if now.checkpointed:  # see holding
        options = replace(options, tiers=())
    if guess:  # Nobody knows yet what the loss takes: this step leaves it all the room that there is.
        options = replace(options, planner="least_memory")
    return options


def _instead(wanted: _Wanted, between: Between | None, error: BudgetError, *, guess: bool) -> tuple[Plan, bool] | None:
    """What runs where the budget has no plan, and whether until more is known.

    That is a plan within what other shapes were granted, one that leaves less to forwards between, or one without room
    for a forward that nobody expected; ``None`` where there is none of these, and ``error`` then says what would help.

    Raises:
        BudgetError: if one of these has no plan either.
    """
    model, now = wanted.model, wanted.now
    if (granted := _granted_bytes(model)) > (error.budget_bytes or 0):
        # A share is of each shape's own peak; what another shape was granted does no harm here.
        return wanted.plan(between, Budget(bytes=granted)), guess
    if guess:
        error.add_note(
            "The loss outside the model is not in these figures: the first step measures what it takes. "
            "Leave room for it above smallest_bytes"
        )
    if not (now.accumulating or model.gradients_stay) and (made := _gradient_bytes(wanted.program)):
        error.add_note(
            "These figures are for gradients that are cleared before each step. Where they are accumulated, "
            f"some {format_bytes(made)} of them are resident from the second micro-batch on, whose smallest "
            "budget is that much larger"
        )
    if model.optimizer is not None and model.offloaded is None and len(parts_of(model.optimizer)) == 1:
        for hint in offload_hint(model.optimizer, now.module, error, wanted.program, wanted.resident_bytes):
            error.add_note(hint)
    if between is not None and between.least_bytes < between.peak_bytes:
        # Forwards that come between can do with less: they are planned for what this one leaves them.
        return wanted.plan(replace(between, peak_bytes=between.least_bytes)), guess
    if not now.flying_bytes or _was_expected(now):
        return None
    # The forward in flight was planned without knowing of this one. The next round knows.
    if all(each.home is not model.flights for each in now.aloft):
        model.warn_of_forward("a forward of another fitted model")
    alone = replace(
        wanted,
        resident_bytes=wanted.resident_bytes - now.flying_bytes,
        options=replace(
            wanted.options,
            planner="least_memory",
            resident_parts=without_flights(wanted.options.resident_parts, now.flying_bytes),
        ),
    )
    return alone.plan(between), True


def _with_room_for_retained(wanted: _Wanted, plan: Plan, retained: Retained) -> Plan:
    """A plan that leaves room for what a backward keeps that retains its graph; ``plan`` itself where there is none."""
    budget = Budget(bytes=plan.budget_bytes)
    between, held = plan.program.between_bytes, plan.program.held_bytes
    options = replace(wanted.options, known=[*wanted.options.known, plan])
    planned = replace(wanted, program=replace(wanted.program, between_bytes=between, held_bytes=held), options=options)
    seeds = [plan.schedule] if plan.rewritten is None else []

    def with_aside(aside_bytes: int) -> Plan:
        return planned.plan(None, budget, aside_bytes=aside_bytes, seeds=seeds)

    roomy = plan_retained(plan, with_aside, retained)
    if roomy is None:
        wanted.model.between.give_up_retained(wanted.now.slot)
        warnings.warn(
            f"no plan within {format_bytes(plan.budget_bytes)} was found that has room for what a backward with "
            "retain_graph=True keeps: steps that retain their graph may exceed the budget",
            stacklevel=users_level(),
        )
    return roomy or plan


# -- what a plan has to leave room for ----------------------------------------------------------------------


def _has_room(executable: Executable, resident: int, between: Between | None, retained: Retained | None) -> bool:
    """Whether there is room, or would be if forwards that come between were planned for what is left to them."""
    program = executable.plan.program
    peak, held = program.between_bytes, program.held_bytes
    if between is not None and (between.peak_bytes, between.held_bytes) != (peak, held):
        peak, held = min(between.peak_bytes, max(peak, between.least_bytes)), between.held_bytes
    needs = executable.needs_with(peak, held, retained)
    return resident + needs <= executable.plan.budget_bytes


def _ends_of(model: FittedModel, step: Step, now: Circumstances) -> list[StepEnd]:
    """What is taken before a call's forward or when its backward has returned, whatever the plan: one or another."""
    hooks = hooks_end(model.after.bytes(now.slot, now.hooks))
    asked = StepEnd(step.capture.asked_bytes, what=_ASKED, remedy=_ASK_OUTSIDE, before=True)
    kept = {"summed": now.accumulating, "gone_bytes": now.flying_bytes}
    if model.offloaded is None:
        if (stepping := model.stepping) is None or (now.updates and not stepping.one_by_one):
            return [hooks, asked]
        return [replace(stepping.end(now.trained), **kept), hooks, asked]
    state = replace(model.offloaded.end, **kept)
    return [state, *(replace(each, held_bytes=state.held_bytes) for each in (hooks, asked))]


def _step_in_words(model: FittedModel, now: Circumstances) -> str:
    """What is counted of the step of an optimizer that was told of."""
    if now.updates:
        return IN_THE_STEP
    return "" if (stepping := model.stepping) is None else taken_of(stepping.taken_bytes(now.trained))


def _gradient_bytes(program: Program) -> int:
    """What the gradients take that the step makes."""
    return sum(program.buffers[each].bytes for each in set(program.gradients))


def _granted_bytes(model: FittedModel) -> int:
    """Definition 3; 0 for a budget in bytes."""
    return 0 if model.budget.share is None else max((plan.budget_bytes for plan in _plans(model)), default=0)


def _was_expected(now: Circumstances) -> bool:
    """Whether all that are in the air are planned with room for a call like this."""
    return all(now.slot in each.expects for each in now.aloft)


def _waits_for_a_loss(model: FittedModel, step: Step, now: Circumstances) -> bool:
    outside = step.captured is not None and loss_is_outside(step.captured)
    return outside and not model.between.has_loss_of(now.slot)


def _known(model: FittedModel) -> list[Plan]:
    """Plans to start from, the one that the user gave among them."""
    return [*_plans(model), *([] if model.start is None else [model.start])]


def _plans(model: FittedModel) -> Iterator[Plan]:
    return (plan for step in model.steps() for plan in step.plans())
