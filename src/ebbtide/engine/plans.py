"""A new plan for a call where none of its step's holds.

1. A plan is a *guess* while something that it depends on is not known: what a loss outside takes, or a forward that it
   was not planned with. It holds until that is known. Where losses of other shapes were measured, what is likely by
   those is planned for instead, if the budget has room for it.
2. A budget that is a share of the unplanned peak *grants* every shape of the model what it has granted any.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ebbtide.capture.joint import Captured
from ebbtide.cost.attach import costs_of
from ebbtide.cost.cache import device_context
from ebbtide.cost.profiling_budget import ProfilingBudget
from ebbtide.engine.call_context import CallContext
from ebbtide.engine.configuration import Configuration, Request
from ebbtide.engine.demands import bytes_to_be_cleared, clearing_is_asked, waits_for_a_loss
from ebbtide.engine.executable import left_bytes
from ebbtide.engine.given import given_plan_here, program_of, start_here
from ebbtide.engine.known_windows import KnownWindows
from ebbtide.engine.optimizer_link import OptimizerLink
from ebbtide.engine.pending_steps import PendingSteps, in_flight_beside
from ebbtide.engine.reserve import reserve_bytes, unsplit_bytes
from ebbtide.engine.resident_by_kind import GRADIENTS, GRADIENTS_TO_COME, STATE, resident_by_kind, without_pending
from ebbtide.engine.retained import Retained, plan_retained, retained_bytes
from ebbtide.engine.step import Step
from ebbtide.engine.traced_graph import ALLOCATOR_GRANULARITY_BYTES
from ebbtide.engine.user_window import UserWindow
from ebbtide.engine.validity import LEAST_MEMORY, Demand, leaves_more
from ebbtide.errors import BudgetError, CaptureError
from ebbtide.faults import forget_frames, users_level
from ebbtide.measurement.resident import gradients_to_come
from ebbtide.optimizer.cost.forecast import offload_hint
from ebbtide.optimizer.state.combined import parts_of
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planning.alternatives import Alternative, lowest_of_each_kind
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.planning.step_end import StepEnd, most_of
from ebbtide.report.plan import Plan
from ebbtide.rewrites.choices import Finish, alternatives_of, itself
from ebbtide.step.program import Program
from ebbtide.step.provenance import LossPlace
from ebbtide.step.refused_budget import refused_budget
from ebbtide.step.schedule import Schedule
from ebbtide.units import Budget, format_bytes

_MOST_ASKED = 3
"""Budgets that are planned before a refusal names one of them."""

__all__ = ["PlanTask", "plan_for", "warn_of_forward"]


def warn_of_forward(what: str) -> None:
    """Say that ``what`` is in flight, without room for this call."""
    warnings.warn(
        f"{what} is in flight: it was planned without room for this one, so this step "
        "may exceed the budget. From the next round on it is planned for. Call backward before the next "
        "forward, or compute what needs no backward under torch.no_grad()",
        stacklevel=users_level(),
    )


# -- a new plan ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlanTask:
    """What a new plan is to be of.

    Attributes:
        step: with the plans that it had.
        captured: its graph where the model's parameters have gradients, or where they do not.
        program: of ``captured``, with costs.
        now: what surrounds the call.
        demand: what the call asks for.
        arguments: of the call.
        configuration: how the model was fitted.
        request: what is asked of its steps.
        windows: what is known of them.
        optimizers: of the model.
        pending: steps of the model.
        other_plans: plans of the model that are at hand.
        known_smallest_bytes: below which budgets were refused for it.
        cleared_bytes: of gradients of earlier steps, counted on to go before the backward.
    """

    step: Step
    captured: Captured
    program: Program
    now: CallContext
    demand: Demand
    arguments: object
    configuration: Configuration
    request: Request
    windows: KnownWindows
    optimizers: OptimizerLink
    pending: PendingSteps
    other_plans: Sequence[Plan]
    known_smallest_bytes: int = 0
    cleared_bytes: int = 0

    @property
    def window(self) -> UserWindow | None:
        """What happens between the graphs of such calls."""
        return self.windows.of(self.now.call_slot, self.cleared_bytes)

    @property
    def finish(self) -> Finish:
        """What is done to a captured step after its rewrites."""
        in_backward = self.optimizers.in_backward
        return in_backward.with_updates if in_backward is not None and self.now.updates else itself

    @property
    def verify(self) -> bool | str:
        """Whether steps are proven."""
        return self.configuration.verify

    def to_come(self) -> dict[str, int]:
        """What a budget has to hold that is not there yet, by kind."""
        found: dict[str, int] = {}
        if self.optimizers.declared is not None:
            found[STATE] = self.optimizers.state_to_come_bytes()
        if self.configuration.gradients_stay:
            granularity = ALLOCATOR_GRANULARITY_BYTES[self.now.device]
            found[GRADIENTS_TO_COME] = gradients_to_come(self.now.module, self.optimizers.declared, granularity)
        return found

    def reserve_bytes(self) -> int:
        """What is kept free besides: for the proof, for what a card's allocator hands out too much, and put aside."""
        reserve = reserve_bytes(self.program, self.now.device, verify=self.verify)
        if self.request.given_plan is None:
            reserve += self.demand.aside_bytes
        if self.now.device == "cuda" and self.request.given_plan is None:  # what its budget leaves free is its maker's
            known = [each.measured.unsplit_bytes for each in self.step.executables]
            reserve += max([unsplit_bytes(self.program), *known])
        return reserve


def plan_for(task: PlanTask, profiling: ProfilingBudget) -> tuple[Plan, bool, int]:
    """The plan for a call, whether it will do only until more is known (definition 1), and the gradients that go in it.

    Gradients that nobody has seen go, but that a call says will, are counted on only where there is no plan with them.
    Forwards that train nothing together with this one are left out where there is no plan with room for them. Nothing
    of the model has run when this returns or raises. What a refusal names is planned once before it is raised, unless
    more is found out for it first.

    Args:
        task: what is to be planned.
        profiling: what was free to find out about it.

    Raises:
        BudgetError: if no schedule within the budget was found.
        CaptureError: if a given plan moves tensors inside of somebody else's checkpoint.
        PlanMismatch: if the given plan is of another step or machine.
    """
    task = replace(task, cleared_bytes=bytes_to_be_cleared(task.now, task.windows))
    if clearing_is_asked(task.now):
        handled = sys.exception()
        try:
            return _plan_for(task)[0], True, 0
        except BudgetError as error:
            forget_frames(error, handled)  # which hold the gradients
        task = replace(task, cleared_bytes=task.now.gradient_bytes)
    try:
        return *_plan_for(task), task.cleared_bytes
    except BudgetError as error:
        if task.request.given_plan is not None or not (profiling.refused_bytes or profiling.knows_all):
            raise
        if (smallest := _accepted_bytes(task, error.smallest_bytes)) == error.smallest_bytes:
            raise
    return *_plan_for(replace(task, known_smallest_bytes=smallest)), task.cleared_bytes


def _accepted_bytes(task: PlanTask, smallest_bytes: int) -> int:
    """The least budget that is planned when it is asked for, from ``smallest_bytes`` on, which a refusal names."""
    for _ in range(_MOST_ASKED):
        budget = Budget(bytes=smallest_bytes)
        try:
            _plan_for(replace(task, request=replace(task.request, budget=budget)))
            break
        except BudgetError as error:
            smallest_bytes = max(error.smallest_bytes, smallest_bytes + 1)
    return smallest_bytes


def _plan_for(task: PlanTask) -> tuple[Plan, bool]:
    now, windows = task.now, task.windows
    to_come, reserve = task.to_come(), task.reserve_bytes()
    resident = task.step.resident_bytes(now) + sum(to_come.values())
    parts = resident_by_kind(
        task.step, now, task.arguments, task.optimizers.all, to_come=to_come, resident_bytes=resident
    )
    if task.request.given_plan is not None:
        return _fit_given_plan(task, task.request.given_plan, resident, reserve, parts), False
    guess = waits_for_a_loss(task.step, now, windows)
    end = most_of(task.demand.ends, task.program)
    window = task.window
    wanted = _Wanted(task, resident, reserve, end, _options(task, parts, guess=guess))
    if guess and window is None and not now.flying_bytes and windows.retained(now.call_slot) is None:
        likely = windows.likely_loss(now.call_slot, task.program.returned_bytes)
        if likely is not None:
            with contextlib.suppress(BudgetError):
                return make_plan(**_as_known(wanted).arguments(likely)), False
    while True:
        try:
            plan = make_plan(**wanted.arguments(window))
            break
        except BudgetError as error:
            try:
                other = _instead(wanted, window, error, guess=guess)
            except BudgetError:
                if not windows.has_untrained(now.call_slot):
                    raise
                other = None
            if other is not None:
                return other
            if not windows.forget_untrained(now.call_slot):
                for note in (
                    *_unknown_here(wanted.options.alternatives or ()),
                    *task.optimizers.advice_to_declare(),
                ):
                    error.add_note(note)
                raise  # here, with no frame more than it has
        _warn_of_untrained()
        window = task.window
    if leaves_more(task.demand, plan.planner, left_bytes(plan)):
        with contextlib.suppress(BudgetError):
            wanted = replace(wanted, options=replace(wanted.options, planner=LEAST_MEMORY))
            plan = make_plan(**wanted.arguments(window))
    retained = windows.retained(now.call_slot)
    return plan if retained is None else _with_room_for_retained(wanted, plan, retained), guess


def _warn_of_untrained() -> None:
    """Say that there is no room for forwards in flight that trained nothing together with another."""
    warnings.warn(
        "forwards of this model have been in flight together without a backward, for which this budget has no "
        "room: where that comes again they may exceed it. Compute what needs no backward under torch.no_grad()",
        stacklevel=users_level(),
    )


def _unknown_here(alternatives: Iterable[Alternative]) -> Iterator[str]:
    """What a refusal says of a rewrite that would lower the budget most, where the budget leaves no room to try it."""
    lowest = min(lowest_of_each_kind(alternatives), key=lambda each: floor_bytes(each.estimated)[0], default=None)
    if lowest is not None and (why := lowest.unknown()):
        yield (
            f"{'; '.join(map(str, lowest.rewrites))} was not tried: {why}. Or make a plan with this budget once in a "
            "process that has room: ebbtide.plan(model, args, budget=...) keeps what it finds out"
        )


def _fit_given_plan(task: PlanTask, plan: Plan, resident: int, reserve: int, parts: Mapping[str, int]) -> Plan:
    """``plan``, which the user gave, if it is for this step and holds here.

    Raises:
        BudgetError: if what is taken when the backward has returned is over its budget.
        CaptureError: if it moves tensors inside of somebody else's checkpoint.
        PlanMismatch: if it is of another step or machine.
    """
    now = task.now
    program = program_of(plan, task.captured, task.program, now.device, task.finish)
    if plan.schedule.moves and now.checkpointed:
        raise CaptureError(
            "the given plan moves tensors, and this call is inside of a checkpoint or saved-tensor hooks of "
            "somebody else's",
            remedy="take the checkpoint away, which the plan replaces, or plan without tiers",
        )
    given = given_plan_here(plan, program, device_context(now.device), resident, reserve, parts)
    end = most_of(task.demand.ends, program)
    if end.needed_bytes(program, resident) > given.budget_bytes:
        raise end.error(program, resident, given.budget_bytes, resident_parts=parts)
    return given


@dataclass(frozen=True)
class _Wanted:
    """A plan that is wanted for a task.

    Attributes:
        task: it.
        resident_bytes: before the call, with what the optimizer will keep.
        reserve_bytes: left free.
        end: what is taken when the backward has returned.
        options: how to plan.
    """

    task: PlanTask
    resident_bytes: int
    reserve_bytes: int
    end: StepEnd
    options: PlanningOptions

    def arguments(
        self,
        window: UserWindow | None,
        budget: Budget | None = None,
        *,
        aside_bytes: int = 0,
        seeds: Sequence[Schedule] = (),
    ) -> dict[str, Any]:
        """Arguments of ``make_plan`` for a plan with room for what happens in the ``window``.

        Args:
            window: ``None`` if nothing does.
            budget: ``None`` is the request's.
            aside_bytes: kept free besides.
            seeds: to start from besides those that are known.
        """
        program = self.task.program
        if window is not None:
            program = replace(program, between_bytes=window.peak_bytes, held_bytes=window.held_bytes)
        return {
            "program": program,
            "budget": self.task.request.budget if budget is None else budget,
            "resident_bytes": self.resident_bytes,
            "reserve_bytes": self.reserve_bytes + aside_bytes,
            "end": self.end,
            "seeds": [*self._seeds(), *seeds],
            "options": self.options,
        }

    def _seeds(self) -> list[Schedule]:
        """Schedules of the program that are known, and what the user's start says of it."""
        program, start = self.task.program, self.task.configuration.start
        same = [plan.schedule for plan in self.task.other_plans if plan.program.fingerprint == program.fingerprint]
        here = [] if start is not None and start.rewritten is not None else start_here(start, program)
        return [*same, *here]


def _options(task: PlanTask, parts: Mapping[str, int], *, guess: bool) -> PlanningOptions:
    """How to plan the step for this call, with where its figures come from."""
    configuration, now, optimizers = task.configuration, task.now, task.optimizers
    costs, estimated = costs_of(task.step.piece.captured.calls if task.step.piece.captured else (), now.device)
    source = replace(
        configuration.planning.provenance,
        machine=now.device,
        costs=costs,
        estimate=estimated,
        optimizer=optimizers.names,
        offloaded="" if optimizers.offloaded is None else optimizers.offloaded.forecast.note,
        optimizer_step=optimizers.step_in_words(now),
        loss=LossPlace.OUTSIDE if guess else None,
    )
    start = [] if configuration.start is None else [configuration.start]
    options = replace(
        configuration.planning,
        provenance=source,
        other_plans=[*task.other_plans, *start],
        resident_parts=parts,
        known_smallest_bytes=task.known_smallest_bytes,
    )
    if now.checkpointed:  # see Step.of_checkpoint
        options = replace(options, tiers=())
    if guess:  # Nobody knows yet what the loss takes: this step leaves it all the room that there is.
        options = replace(options, planner=LEAST_MEMORY)
    if configuration.rewrites:
        alternatives = alternatives_of(
            task.captured,
            task.program,
            now.device,
            retained=task.demand.retained is not None,
            rules=configuration.rewrites,
            first=configuration.first_rewrites,
            finish=task.finish,
        )
        options = replace(options, alternatives=alternatives)
    return options


def _as_known(wanted: _Wanted) -> _Wanted:
    """``wanted`` where nothing has to be left to what nobody knows yet."""
    options, usual = wanted.options, wanted.task.configuration.planning
    source = replace(options.provenance, loss=None)
    return replace(wanted, options=replace(options, planner=usual.planner, provenance=source))


def _instead(
    wanted: _Wanted, window: UserWindow | None, error: BudgetError, *, guess: bool
) -> tuple[Plan, bool] | None:
    """What runs where the budget has no plan, and whether until more is known.

    That is a plan within what other shapes were granted, one that leaves less to forwards between, or one without room
    for a forward that nobody expected; ``None`` where there is none of these, and ``error`` then says what would help.

    Raises:
        BudgetError: if one of these has no plan either.
    """
    task, now = wanted.task, wanted.task.now
    share = task.request.budget.share is not None
    granted = max((plan.budget_bytes for plan in task.other_plans), default=0) if share else 0
    if granted > (error.budget_bytes or 0):
        # A share is of each shape's own peak; what another shape was granted does no harm here.
        return make_plan(**wanted.arguments(window, Budget(bytes=granted))), guess
    for note in _figures_leave_out(wanted, error):
        error.add_note(note)
    if window is not None and window.least_bytes < window.peak_bytes:
        # Forwards that come between can do with less: they are planned for what this one leaves them.
        return make_plan(**wanted.arguments(replace(window, peak_bytes=window.least_bytes))), guess
    if not now.flying_bytes or now.was_expected:
        return None
    # The forward in flight was planned without knowing of this one. The next round knows.
    if all(each.siblings is not task.pending for each in now.pending):
        warn_of_forward("a forward of another fitted model")
    alone = replace(
        wanted,
        resident_bytes=wanted.resident_bytes - now.flying_bytes,
        options=replace(
            wanted.options,
            planner=LEAST_MEMORY,
            resident_parts=without_pending(wanted.options.resident_parts, now.flying_bytes),
        ),
    )
    try:
        return make_plan(**alone.arguments(window)), True
    except BudgetError as refused:
        together = _together_bytes(alone, window, refused.smallest_bytes)
    options = replace(alone.options, known_smallest_bytes=max(together, task.known_smallest_bytes))
    try:
        return make_plan(**replace(alone, options=options).arguments(window)), True
    except BudgetError as refused:
        refused.add_note("Another forward is in flight without a backward: the smallest budget has room for both")
        raise


def _together_bytes(alone: _Wanted, window: UserWindow | None, smallest_bytes: int) -> int:
    """The least budget for a call and the forwards in flight that did not expect it, as the next round plans for both.

    Args:
        alone: the plan that is wanted for the call, without them.
        window: of the call.
        smallest_bytes: the least budget for the call alone.
    """
    with contextlib.suppress(BudgetError):
        plan = make_plan(**alone.arguments(window, Budget(bytes=smallest_bytes)))
        for executable, besides in in_flight_beside(alone.task.now.inputs, alone.task.now.pending):
            earlier, program = executable.plan, executable.plan.program
            peak = besides + plan.reserve_bytes + plan.timeline.above_bytes
            both = replace(
                alone,
                task=replace(
                    alone.task,
                    program=replace(
                        program,
                        between_bytes=max(program.between_bytes, peak),
                        held_bytes=max(program.held_bytes, besides + left_bytes(plan)),
                    ),
                ),
                resident_bytes=earlier.resident_bytes,
                reserve_bytes=earlier.reserve_bytes,
                options=replace(alone.options, alternatives=None),
            )
            try:
                make_plan(**both.arguments(None, Budget(bytes=smallest_bytes)))
            except BudgetError as error:
                smallest_bytes = max(smallest_bytes, error.smallest_bytes)
    return smallest_bytes


def _figures_leave_out(wanted: _Wanted, error: BudgetError) -> Iterator[str]:
    """What is not in the figures of a refusal, or would lower them."""
    task, now = wanted.task, wanted.task.now
    program = task.program
    made = sum(program.buffers[each].bytes for each in set(program.gradients))
    if made and not (now.accumulating or task.configuration.gradients_stay):
        yield f"Where gradients are accumulated, add {format_bytes(made)} from the second micro-batch on"
    there = (wanted.options.resident_parts or {}).get(GRADIENTS, 0)
    if there and not task.cleared_bytes:
        yield (
            f"Gradients of earlier steps are {format_bytes(there)} of that. Where they are not added to, zero them "
            "before the forward (optimizer.zero_grad())"
        )
    declared = task.optimizers.declared
    if declared is not None and task.optimizers.offloaded is None and len(parts_of(declared)) == 1:
        yield from offload_hint(declared, now.module, error, program, wanted.resident_bytes)


def _with_room_for_retained(wanted: _Wanted, plan: Plan, retained: Retained) -> Plan:
    """A plan that leaves room for what a backward keeps that retains its graph.

    Raises:
        BudgetError: if none was found.
    """
    budget = Budget(bytes=plan.budget_bytes)
    between, held = plan.program.between_bytes, plan.program.held_bytes
    options = replace(wanted.options, other_plans=[*wanted.options.other_plans, plan])
    program = replace(wanted.task.program, between_bytes=between, held_bytes=held)
    planned = replace(wanted, task=replace(wanted.task, program=program), options=options)
    seeds = [plan.schedule] if plan.rewritten is None else []

    def with_aside(aside_bytes: int) -> Plan:
        return make_plan(**planned.arguments(None, budget, aside_bytes=aside_bytes, seeds=seeds))

    if (roomy := plan_retained(plan, with_aside, retained)) is not None:
        return roomy
    roomy = _least_of(planned)
    needed = retained_bytes(roomy, retained)
    if needed <= plan.budget_bytes:
        return replace(roomy, budget_bytes=plan.budget_bytes, reserve_bytes=needed - roomy.predicted_peak_bytes)
    needed = max(needed, wanted.options.known_smallest_bytes)
    raise refused_budget(
        "a backward retained its graph before (retain_graph=True), and what is saved for it stays: no plan within the "
        "budget was found that has room for that",
        remedy=f"ask for at least {needed} bytes (of a fitted model: ebbtide.set_budget), or retain no graph",
        budget_bytes=plan.budget_bytes,
        floor_bytes=roomy.floor_bytes,
        smallest_bytes=needed,
        resident_bytes=roomy.resident_bytes,
        reserve_bytes=roomy.reserve_bytes,
        resident_parts=wanted.options.resident_parts,
        pinned_by="a retained graph",
        needs=[("smallest for which a plan was found", needed, "with room for what is saved")],
    )


def _least_of(wanted: _Wanted) -> Plan:
    """The plan of the least budget that there is."""
    least = replace(wanted, options=replace(wanted.options, planner=LEAST_MEMORY, known_smallest_bytes=0))
    budget = Budget(bytes=1)
    while True:
        try:
            return make_plan(**least.arguments(None, budget))
        except BudgetError as error:
            assert budget.bytes is not None
            budget = Budget(bytes=max(error.smallest_bytes, budget.bytes + 1))
