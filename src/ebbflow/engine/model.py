"""What is known of one fitted model: its captured steps, what surrounds its calls, what was learned of user code.

1. A call's *key* is what its step depends on as far as that can be read off the call (``key``). Torch's guards know
   the rest, so a key may have several steps, of which the one used last is tried first. Of more than
   :data:`_MOST_STEPS` in all, those used longest ago go.
2. The *circumstances* of a call are what a plan depends on besides its step: what is resident, and what forwards in
   flight keep. A plan *holds* while what is resident leaves room for it and nothing else has been learned about what
   happens between its two graphs; otherwise another is made for the same capture.
3. What happens *between* the graphs is learned from the first step (``between``), which is itself planned for the
   least memory where it has to leave room for what nobody knows yet.
4. From the fifth shape of one kind of call on, steps share a symbolic capture (``shared_calls``).
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from ebbflow.capture.loss import loss_is_outside
from ebbflow.cost.attach import costs_of
from ebbflow.cost.cache import device_context
from ebbflow.engine.after import AfterBackward, hooks_end
from ebbflow.engine.between import Between, Knowledge, learn_flight
from ebbflow.engine.calls import Calls
from ebbflow.engine.compiled import Call, Capture
from ebbflow.engine.executable import SCALARS_BYTES, Executable
from ebbflow.engine.executor import being_watched
from ebbflow.engine.flights import Flight, Flights, aloft, flights_of, kept_bytes, kept_inputs
from ebbflow.engine.given import given_plan_here, start_here
from ebbflow.engine.key import Code, Slot, key_of, modes_of
from ebbflow.engine.offloaded import Offloaded, offload_hint
from ebbflow.engine.reserve import reserve_bytes
from ebbflow.engine.retained import Retained, plan_retained
from ebbflow.engine.shared_calls import Kinds
from ebbflow.engine.step import Step
from ebbflow.errors import BudgetError, CaptureError
from ebbflow.faults import users_level
from ebbflow.measurement.between import BetweenGauge
from ebbflow.measurement.optimizer_state import future_state_bytes
from ebbflow.measurement.resident import start_bytes, watched_in
from ebbflow.planners import Progress
from ebbflow.planning.pipeline import PlanningOptions, make_plan
from ebbflow.planning.step_end import StepEnd, most_of
from ebbflow.step.plan import Plan
from ebbflow.step.program import Program
from ebbflow.step.provenance import LossPlace
from ebbflow.torch_seams.autograd import has_saved_tensor_hooks, in_backward
from ebbflow.torch_seams.eager_answers import Answers
from ebbflow.torch_seams.storages import StorageWatch, walk
from ebbflow.transfers.ways import Way
from ebbflow.units import Budget, format_bytes, format_count

__all__ = ["Circumstances", "FittedModel"]

_MOST_STEPS = 256  # captured steps kept of one model: 5 to 20 MiB each of the process' own memory, not of the budget
_MOST_OF_A_KEY = 8
_numbers = itertools.count(1)
_MOST_IN_A_ROW = 16  # captures of one key of which none served a second call, after which the next is refused
_MANY_CAPTURES = 8  # captures of one key after which it is said that something changes at every call


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What surrounds a call (definition 2).

    Attributes:
        slot: key of the call, and how many of the model's forwards are in the air (``between``).
        modes: what of the key does not depend on the arguments.
        trained: per parameter whether it takes a gradient.
        accumulating: whether every parameter that takes a gradient has one.
        module: whose call it is.
        inputs: watches its arguments; empty on CUDA, where the allocator knows.
        device: ``"cpu"`` or ``"cuda"``.
        resident_bytes: before the forward, what flights keep among them.
        reached: keys of the storages that were counted as the model's, one by one.
        aloft: forwards in flight (``flights.aloft``).
        flying_bytes: what they keep.
        hooked: whether saved-tensor hooks are active, as in a checkpoint.
        repeated: whether a backward is running, so that this is a checkpoint's repetition of a forward.
        hooks: on parameters.
    """

    slot: Slot
    modes: object
    trained: bytes
    accumulating: bool
    module: torch.nn.Module
    inputs: tuple[StorageWatch, ...]
    device: str
    resident_bytes: int
    reached: frozenset[int]
    aloft: tuple[Flight, ...]
    flying_bytes: int
    hooked: bool
    repeated: bool
    hooks: tuple[int, ...]

    @property
    def key(self) -> object:
        """Of the call."""
        return self.slot.key

    @property
    def checkpointed(self) -> bool:
        """Whether somebody else's checkpoint or offload may be around this call."""
        return self.hooked or self.repeated


@dataclass(kw_only=True, eq=False)
class FittedModel:
    """One fitted model.

    Attributes:
        plain_class: the model's own class.
        budget: of every step.
        given_plan: the plan to run, if the user gave one.
        options: how to plan.
        optimizer: whose state counts as resident.
        verify: whether first steps are proven and later ones measured, or every step proven.
        every_output: whether outputs beside a scalar loss take gradients too.
        start: a plan from whose schedule searches start too, made anywhere.
        tiers: by name, those that plans may move buffers to.
        offloaded: where the optimizer's state is in a step, if not in place.
        last: the step that ran last.
        flights: forwards whose backward has not come.
        number: of the model among all that were ever fitted.
        calls: how its calls went.
        not_captured: keys of calls that have nothing to train and are no graph either.
    """

    plain_class: type[torch.nn.Module]
    budget: Budget
    given_plan: Plan | None
    options: PlanningOptions
    optimizer: torch.optim.Optimizer | None
    verify: bool | Literal["always"]
    every_output: bool
    start: Plan | None = None
    tiers: Mapping[str, Way] = field(default_factory=dict[str, Way])
    offloaded: Offloaded | None = None
    last: Step | None = None
    flights: Flights = field(init=False)
    number: int = field(default_factory=_numbers.__next__)
    calls: Calls = field(default_factory=Calls)
    not_captured: set[object] = field(default_factory=set[object])
    _steps: OrderedDict[object, list[Step]] = field(default_factory=OrderedDict[object, list[Step]])  # last used: last
    _between: Knowledge = field(default_factory=Knowledge)
    _after: AfterBackward = field(default_factory=AfterBackward)
    _captures: dict[object, int] = field(default_factory=dict[object, int])
    _in_a_row: dict[object, int] = field(default_factory=dict[object, int])
    _forgot: bool = False
    _kinds: Kinds = field(default_factory=Kinds)
    _code: Code = field(default_factory=Code)

    def __post_init__(self) -> None:
        self.flights = Flights(self._between)

    def set_budget(self, budget: Budget, plan: Plan | None) -> None:
        """Plan for another budget, or run another plan, from the next call on. What is captured stays."""
        self.budget, self.given_plan = budget, plan
        for step in self._all_steps():
            step.forget_plans()

    # -- a call ---------------------------------------------------------------------------------------------

    def look_around(self, call: Call) -> Circumstances:
        """What surrounds ``call``."""
        inputs = watched_in([call.args, call.kwargs]) if call.device == "cpu" else []
        others = {**kept_inputs(), **{each.key: each.bytes for each in inputs}}
        trained, accumulating, own, classes, hooks = walk(call.module)
        resident = start_bytes(own, self.optimizer, others, call.device)
        flying = aloft(self.flights)
        modes = (modes_of(call.module, call.device, trained), self._code.of(classes))
        return Circumstances(
            modes=modes,
            accumulating=accumulating,
            trained=trained,
            slot=Slot(
                key_of(modes, call.args, call.kwargs),
                len(self.flights.in_the_air),
                self.number,
            ),
            module=call.module,
            inputs=tuple(inputs),
            device=call.device,
            # On CUDA what is in the air is counted already.
            resident_bytes=resident + kept_bytes() if call.device == "cpu" else resident,
            reached=frozenset(own) if call.device == "cpu" else frozenset(),
            aloft=tuple(flying),
            flying_bytes=sum(each.executable.leaves_bytes for each in flying if each.executable is not None),
            hooked=has_saved_tensor_hooks(),
            repeated=in_backward(),
            hooks=hooks,
        )

    def warn_of_flights(self, now: Circumstances) -> None:
        """Say once that a second forward was not planned for."""
        own = [each for each in now.aloft if each.home is self.flights]
        expected = any(self._between.expects_forwards(each.slot) for each in own)
        if own and not expected and not now.checkpointed:
            self._warn_of("another forward of this model")

    def _warn_of(self, what: str) -> None:
        warnings.warn(
            f"{what} is in flight: it was planned without room for this one, so this step "
            "may exceed the budget. From the next round on it is planned for. Call backward before the next "
            "forward, or compute what needs no backward under torch.no_grad()",
            stacklevel=users_level(),
        )

    def steps_for(self, call: Call, now: Circumstances) -> Iterator[Step]:
        """Captured steps that may serve a call, then fresh ones. Whoever asks on has found the last one unfit."""
        known = self._steps.get(now.key, [])
        yield from reversed(known.copy())
        self.options.progress(Progress(f"capturing the step of {self.plain_class.__name__}"))
        if self.given_plan is None and not any(step.capture.symbolic for step in known):
            shared = self._kinds.capture_for(now.modes, call.args, call.kwargs, self._capture)
            if shared is not None:
                yield Step(shared, verify=self.verify, tiers=self.tiers)
                self._kinds.failed(shared)
        self._refuse_endless(now.key, functools.partial(known[-1].capture.changed_for, call) if known else str)
        yield Step(self._capture(call.device, None), verify=self.verify, tiers=self.tiers)

    def knows(self, now: Circumstances) -> bool:
        """Whether a call with the key of this one was captured before."""
        return now.key in self._steps

    def retains(self, now: Circumstances) -> bool:
        """Whether a backward of a call like this is known to retain its graph."""
        return self._between.retained(now.slot) is not None

    def _capture(self, device: str, changing: tuple[tuple[int, ...], ...] | None) -> Capture:
        known = Answers()
        if changing is not None:  # A shared capture takes the branches that the others took.
            each = [step.capture.answers for step in self._all_steps()]
            known = Answers(set().union(*(one.compiled for one in each)), any(one.everywhere for one in each))
        return Capture(device=device, name=self.plain_class.__name__, changing=changing, answers=known)

    def count_capture(self, now: Circumstances) -> None:
        """A call was captured for itself. One that raises as it does in eager was not."""
        self._captures[now.key] = self._captures.get(now.key, 0) + 1
        self._in_a_row[now.key] = self._in_a_row.get(now.key, 0) + 1

    def _refuse_endless(self, key: object, changed: Callable[[], str]) -> None:
        """The call of this key is about to be captured again."""
        count, in_a_row = self._captures.get(key, 0) + 1, self._in_a_row.get(key, 0) + 1
        if count != _MANY_CAPTURES and in_a_row <= _MOST_IN_A_ROW:
            return
        what = changed()
        reason = (
            f"{self.plain_class.__name__} has been captured "
            f"{format_count(count - (in_a_row > _MOST_IN_A_ROW), 'time')} for the same inputs: something that its step "
            "depends on changes between calls (a number that counts steps, a list or a dictionary that grows)"
        ) + (f". It was captured where {what}, which this call is not" if what else "")
        remedy = (
            "keep counters in tensors (register_buffer), and append to lists outside of the forward, where its "
            "outputs are at hand"
        )
        if in_a_row > _MOST_IN_A_ROW:
            raise CaptureError(f"{reason}. Each of the last {_MOST_IN_A_ROW} calls took seconds", remedy=remedy)
        warnings.warn(
            f"{reason}. Each capture takes seconds, and after {_MOST_IN_A_ROW} in a row calls are refused; {remedy}",
            stacklevel=users_level(),
        )

    def keep(self, step: Step, now: Circumstances) -> None:
        """``step`` is captured, or ran once more."""
        key = now.key
        others = [each for each in self._steps.get(key, ()) if each is not step]
        self._steps[key] = [*others[1 - _MOST_OF_A_KEY :], step]  # Ctrl-C in between loses no step
        self._steps.move_to_end(key)
        if len(self._steps) <= _MOST_STEPS:
            return
        oldest = next(iter(self._steps))
        del self._steps[oldest]
        self._captures.pop(oldest, None)
        self._in_a_row.pop(oldest, None)
        if not self._forgot:
            self._forgot = True
            warnings.warn(
                f"{self.plain_class.__name__} has been called with more than {_MOST_STEPS} kinds of arguments; those "
                "used longest ago are forgotten and captured again when they come back, which takes seconds. Pad "
                "lengths to multiples of 8 or 16 to have fewer shapes",
                stacklevel=users_level(),
            )

    def ran(self, step: Step, flight: Flight, now: Circumstances) -> None:
        """The forward of ``step`` has returned."""
        self.keep(step, now)
        self.last = step
        if self.offloaded is not None:
            step.optimizer_traffic = self.offloaded.traffic
        if step.forward_calls > 1:
            self._in_a_row[now.key] = 0
        if now.checkpointed:
            return
        if now.flying_bytes:
            learn_flight(flight, [each for each in now.aloft if each.number in each.home.in_the_air])
        elif not self._is_measured(now) and not being_watched(now.device):
            learn = functools.partial(self._learn_loss, now, step)
            flight.between = BetweenGauge(now.device, learn)
            flight.between.begin()

    def _is_measured(self, now: Circumstances) -> bool:
        """Whether it is known what user code takes outside of the two graphs."""
        return self._between.has_loss_of(now.slot) and self._after.is_known(now.slot, now.hooks)

    def _all_steps(self) -> Iterator[Step]:
        return (step for steps in self._steps.values() for step in steps)

    # -- plans ----------------------------------------------------------------------------------------------

    def holding(self, step: Step, now: Circumstances) -> Executable | None:
        """Of the plans of ``step`` that hold the one of least overhead; ``None`` if none does (definition 2).

        A checkpoint compares what a repeated forward saves with what the first one did, so while one of a step's
        forwards is in flight under saved-tensor hooks, its plan stays, for calls under hooks. Its backward cannot be
        told which forward it belongs to, so no plan that moves buffers holds there.
        """
        if now.checkpointed:
            for each in reversed(step.executables):
                if any(flight.hooked for flight in flights_of(each)):
                    return each
        between, retained = self._between.of(now.slot), self._between.retained(now.slot)
        resident = self.resident_bytes(step, now)
        ends = self._ends_of(now)
        fitting = [
            each
            for each in step.executables
            if _holds(each, resident, between, retained)
            and all(end.needed_bytes(each.plan.program, resident) <= each.plan.budget_bytes for end in ends)
            and not (each.provisional and not self.is_guess(step, now))
            and (now.accumulating or not each.accumulates)
            and not (each.moves and now.checkpointed)
        ]
        return min(fitting, key=lambda each: each.overhead) if fitting else None

    def plan_for(self, step: Step, program: Program, now: Circumstances) -> tuple[Plan, bool]:
        """The plan for a captured step with costs, and whether it will do only until more is known.

        Nothing of the model has run when this returns or raises.
        """
        reserve = reserve_bytes(program, now.device, verify=self.verify)
        resident = self.resident_bytes(step, now)
        if self.optimizer is not None:
            away = self.offloaded
            resident += future_state_bytes(self.optimizer) if away is None else away.resident_to_come_bytes
        if self.given_plan is not None:
            if self.given_plan.schedule.moves and now.checkpointed:
                raise CaptureError(
                    "the given plan moves tensors, and this call is inside of a checkpoint or saved-tensor hooks of "
                    "somebody else's",
                    remedy="take the checkpoint away, which the plan replaces, or plan without tiers",
                )
            given = given_plan_here(self.given_plan, program, device_context(now.device), resident, reserve)
            end = most_of(self._ends_of(now), program)
            if end.needed_bytes(program, resident) > given.budget_bytes:
                raise end.error(program, resident, given.budget_bytes)
            return given, False
        guess = self._waits_for_a_loss(step, now)
        costs, estimated = costs_of(step.captured.calls if step.captured else (), now.device)
        source = replace(
            self.options.provenance,
            machine=now.device,
            costs=costs,
            estimate=estimated,
            optimizer="" if self.optimizer is None else type(self.optimizer).__name__,
            offloaded="" if self.offloaded is None else self.offloaded.note,
            loss=LossPlace.OUTSIDE if guess else None,
        )
        options = replace(self.options, provenance=source)
        if now.checkpointed:  # see holding
            options = replace(options, tiers=())
        if guess:  # Nobody knows yet what the loss takes: this step leaves it all the room that there is.
            options = replace(options, planner="least_memory")
        seeds = [plan.schedule for plan in self._plans() if plan.program.fingerprint == program.fingerprint]
        seeds += start_here(self.start, program)
        between = self._between.of(now.slot)
        end = most_of(self._ends_of(now), program)
        make = functools.partial(make_plan, reserve_bytes=reserve, end=end, seeds=seeds)
        try:
            plan = make(_with(program, between), self.budget, resident_bytes=resident, options=options)
        except BudgetError as error:
            if (granted := self._granted_bytes()) > (error.budget_bytes or 0):
                # A share is of each shape's own peak; what another shape was granted does no harm here.
                granted_budget = Budget(bytes=granted)
                return make(_with(program, between), granted_budget, resident_bytes=resident, options=options), guess
            if guess:
                error.add_note(
                    "The loss outside the model is not in these figures: the first step measures what it takes. "
                    "Leave room for it above smallest_bytes"
                )
            if not now.accumulating and (made := _gradient_bytes(program)):
                error.add_note(
                    "These figures are for gradients that are cleared before each step. Where they are accumulated, "
                    f"some {format_bytes(made)} of them are resident from the second micro-batch on, whose smallest "
                    "budget is that much larger"
                )
            if self.optimizer is not None and self.offloaded is None:
                for hint in offload_hint(self.optimizer, now.module, error, program, resident):
                    error.add_note(hint)
            if between is not None and between.least_bytes < between.peak_bytes:
                # Forwards that come between can do with less: they are planned for what this one leaves them.
                least = replace(between, peak_bytes=between.least_bytes)
                return make(_with(program, least), self.budget, resident_bytes=resident, options=options), guess
            if not now.flying_bytes or self._was_expected(now):
                raise
            # The forward in flight was planned without knowing of this one. The next round knows.
            if all(each.home is not self.flights for each in now.aloft):
                self._warn_of("a forward of another fitted model")
            options = replace(options, planner="least_memory")
            less = resident - now.flying_bytes
            return make(_with(program, between), self.budget, resident_bytes=less, options=options), True
        if (retained := self._between.retained(now.slot)) is None:
            return plan, guess

        def with_aside(aside: int) -> Plan:
            return make_plan(
                plan.program,
                Budget(bytes=plan.budget_bytes),
                resident_bytes=resident,
                reserve_bytes=reserve + aside,
                end=end,
                seeds=[*seeds, plan.schedule],
                options=options,
            )

        roomy = plan_retained(plan, with_aside, retained)
        if roomy is None:
            self._between.give_up_retained(now.slot)
            warnings.warn(
                f"no plan within {format_bytes(plan.budget_bytes)} was found that has room for what a backward with "
                "retain_graph=True keeps: steps that retain their graph may exceed the budget",
                stacklevel=users_level(),
            )
        return roomy or plan, guess

    def _ends_of(self, now: Circumstances) -> list[StepEnd]:
        """What is taken when the backward of a call has returned, whatever the plan: one thing or another."""
        hooks = hooks_end(self._after.bytes(now.slot, now.hooks))
        if self.offloaded is None:
            return [hooks]
        state = replace(self.offloaded.end, summed=now.accumulating)
        return [state, replace(hooks, held_bytes=state.held_bytes)]

    def _granted_bytes(self) -> int:
        """What a share of the unplanned peak has come to at the most, for any shape; 0 for a budget in bytes."""
        return 0 if self.budget.share is None else max((plan.budget_bytes for plan in self._plans()), default=0)

    def _was_expected(self, now: Circumstances) -> bool:
        """Whether all that are in the air are planned with room for a call like this."""
        return all(now.slot in each.expects for each in now.aloft)

    def expected(self, now: Circumstances) -> frozenset[Slot]:
        """Slots of calls that one at this slot leaves room for."""
        return self._between.expected(now.slot)

    def _waits_for_a_loss(self, step: Step, now: Circumstances) -> bool:
        outside = step.captured is not None and loss_is_outside(step.captured)
        return outside and not self._between.has_loss_of(now.slot)

    def is_guess(self, step: Step, now: Circumstances) -> bool:
        """Whether something that a plan depends on is not known yet."""
        return self._waits_for_a_loss(step, now) or (bool(now.flying_bytes) and not self._was_expected(now))

    def resident_bytes(self, step: Step, now: Circumstances) -> int:
        """What is resident before a call of ``step``; the allocator of a card has its hidden inputs."""
        return now.resident_bytes + (step.hidden_bytes(now.reached) if now.device == "cpu" else 0)

    def _plans(self) -> Iterator[Plan]:
        return (plan for step in self._all_steps() for plan in step.plans())

    # -- what is learned from a first step ------------------------------------------------------------------

    def _learn_loss(
        self, now: Circumstances, step: Step, peak_bytes: int, left_bytes: int, after_bytes: int, after_left_bytes: int
    ) -> None:
        """What user code took between the two graphs of ``step`` (a loss outside, or what is added) and after them."""
        plan = step.plan
        if plan is None:
            return
        self._after.learn(now.slot, now.hooks, plan, after_bytes, after_left_bytes)
        if self._between.has_loss_of(now.slot):
            return
        tangents = plan.program.late_bytes - plan.program.held_bytes
        if peak_bytes - tangents <= SCALARS_BYTES:  # a loss that is divided or logged
            peak_bytes = left_bytes = 0
        self._between.learn_loss(now.slot, peak_bytes, max(left_bytes - tangents, 0))
        total = plan.resident_bytes + plan.boundary_bytes + peak_bytes
        if total > plan.budget_bytes:
            warnings.warn(
                f"code outside the model took {format_bytes(peak_bytes)} between forward and backward, so this first "
                f"step took {format_bytes(total)}, over its budget of {format_bytes(plan.budget_bytes)}; "
                "from the next step on it is planned for",
                stacklevel=users_level(),
            )


def _with(program: Program, between: Between | None) -> Program:
    """``program`` with what happens between its graphs."""
    if between is None:
        return program
    return replace(program, between_bytes=between.peak_bytes, held_bytes=between.held_bytes)


def _gradient_bytes(program: Program) -> int:
    """What the gradients take that the step makes."""
    return sum(program.buffers[each].bytes for each in set(program.gradients))


def _holds(executable: Executable, resident_bytes: int, between: Between | None, retained: Retained | None) -> bool:
    """Whether there is room, or would be if forwards that come between were planned for what is left to them."""
    program = executable.plan.program
    peak, held = program.between_bytes, program.held_bytes
    if between is not None and (between.peak_bytes, between.held_bytes) != (peak, held):
        peak, held = min(between.peak_bytes, max(peak, between.least_bytes)), between.held_bytes
    needs = executable.needs_with(peak, held, retained)
    return resident_bytes + needs <= executable.plan.budget_bytes
