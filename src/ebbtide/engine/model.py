"""What is known of one fitted model: its captured steps, what surrounds its calls, what was learned of user code.

1. A call's *key* is what its step depends on as far as that can be read off the call (``key``). Torch's guards know
   the rest, so a key may have several steps, of which the one used last is tried first. Of more than
   :data:`_MOST_STEPS` in all, those used longest ago go.
2. The *circumstances* of a call are what a plan depends on besides its step: what is resident, and what forwards in
   flight keep. Which plan it runs under is said in ``plans``.
3. What happens *between* the graphs is learned from the first step (``between``), which is itself planned for the
   least memory where it has to leave room for what nobody knows yet.
4. From the fifth shape of one kind of call on, steps share a symbolic capture (``shared_calls``).
"""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from ebbtide.capture.numbers import Numbers
from ebbtide.engine.after import AfterBackward
from ebbtide.engine.between import Knowledge, learn_flight
from ebbtide.engine.calls import Calls
from ebbtide.engine.circumstances import Circumstances
from ebbtide.engine.compiled import Call, Capture
from ebbtide.engine.executor import being_watched
from ebbtide.engine.flights import Flight, Flights, aloft, kept_bytes, kept_inputs
from ebbtide.engine.gradient_watcher import GradientWatcher
from ebbtide.engine.key import Code, Slot, key_of, modes_of
from ebbtide.engine.offload_hooks import refuse_offload_hooks
from ebbtide.engine.shared_calls import Kinds
from ebbtide.engine.step import Step
from ebbtide.errors import CaptureError, UsageError
from ebbtide.faults import users_level
from ebbtide.measurement.between import BetweenGauge
from ebbtide.measurement.resident import held_by, optimizers_in, resident_bytes, start_bytes, watched_in
from ebbtide.optimizer.cost.step_end import OptimizerStepCost, StepRecheck
from ebbtide.optimizer.in_step.optimizer_in_backward import OptimizerInBackward
from ebbtide.optimizer.offload.budgeted_offload import BudgetedOffload
from ebbtide.optimizer.state.combined import class_names
from ebbtide.planners import Progress
from ebbtide.planning.pipeline import PlanningOptions
from ebbtide.planning.step_end import SCALARS_BYTES
from ebbtide.report.plan import Plan
from ebbtide.torch_seams.autograd import has_saved_tensor_hooks, in_backward
from ebbtide.torch_seams.data_parallel import bucket_bytes
from ebbtide.torch_seams.eager_answers import Answers
from ebbtide.torch_seams.input_branches import Question
from ebbtide.torch_seams.optimizers import is_of_torch
from ebbtide.torch_seams.storages import walk
from ebbtide.transfers.ways import Way
from ebbtide.units import Budget, format_bytes, format_count

__all__ = ["FittedModel"]

_MOST_STEPS = 256  # captured steps kept of one model: 5 to 20 MiB each of the process' own memory, not of the budget
_MOST_OF_A_KEY = 8
_MOST_WAYS = 64  # captures of one key that differ by what branches on their inputs were answered
_numbers = itertools.count(1)
_MOST_IN_A_ROW = 16  # captures of one key of which none served a second call, after which the next is refused
_MANY_CAPTURES = 8  # captures of one key after which it is said that something changes at every call


_CHANGES = (
    "something that its step depends on changes between calls (a number that counts steps, a list or a dictionary that "
    "grows)",
    "keep counters in tensors (register_buffer), and append to lists outside of the forward, where its outputs are at "
    "hand",
)
_WAYS = (
    "values of its inputs decide its branches, and calls go many ways",
    "compute without branches (torch.where), or decide outside of the model",
)
"""Why a call is captured again and again, and what to do."""


@dataclass(kw_only=True, eq=False)
class FittedModel:
    """One fitted model.

    Attributes:
        plain_class: the model's own class.
        budget: of every step.
        given_plan: the plan to run, if the user gave one.
        options: how to plan.
        optimizer: whose state counts as resident, also before it exists.
        other_optimizers: that have stepped weights of the model and were not told: what state they have counts.
        verify: whether first steps are proven and later ones measured, or every step proven.
        every_output: whether outputs beside a scalar loss take gradients too.
        start: a plan from whose schedule searches start too, made anywhere.
        rewrites: names of the rules by which parts of its steps may be replaced by what has the same bits.
        first_rewrites: of these, those that are tried before the others; all if ``None``.
        tiers: by name, those that plans may move buffers to.
        offloaded: where the optimizer's state is in a step, if not in place.
        gradients_stay: whether gradients are there when a call begins, and may be cleared before its backward, as
            Lightning's trainer does: room is kept for them from the first call on, and no plan counts on them.
        advice: what of a trainer's would be planned, where one calls the model.
        inside: the optimizer in its steps, if it is (``inside``).
        last: the step that ran last.
        flights: forwards whose backward has not come.
        number: of the model among all that were ever fitted.
        calls: how its calls went.
        stepped_parameters: how many the optimizer had when a plan held for the last time, once it has any state.
        asked: how often another budget or optimizer has been asked for; plans of before do not hold.
        not_captured: keys of calls that have nothing to train and are no graph either.
        between: what happens between the graphs of its steps, as far as that is learned.
        after: what is taken when their backwards have returned, likewise.
        arrivals: of gradients at its parameters.
    """

    plain_class: type[torch.nn.Module]
    budget: Budget
    given_plan: Plan | None
    options: PlanningOptions
    optimizer: torch.optim.Optimizer | None
    verify: bool | Literal["always"]
    every_output: bool
    start: Plan | None = None
    rewrites: tuple[str, ...] = ()
    first_rewrites: tuple[str, ...] | None = None
    tiers: Mapping[str, Way] = field(default_factory=dict[str, Way])
    offloaded: BudgetedOffload | None = None
    gradients_stay: bool = False
    advice: str = ""
    inside: OptimizerInBackward | None = None
    last: Step | None = None
    flights: Flights = field(init=False)
    number: int = field(default_factory=_numbers.__next__)
    calls: Calls = field(default_factory=Calls)
    asked: int = 0
    stepped_parameters: int | None = None
    not_captured: set[object] = field(default_factory=set[object])
    other_optimizers: weakref.WeakSet[torch.optim.Optimizer] = field(
        default_factory=lambda: weakref.WeakSet[torch.optim.Optimizer]()
    )
    _met_with: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = field(
        default_factory=lambda: weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
    )  # bytes of state that the other optimizers had
    _steps: OrderedDict[object, list[Step]] = field(default_factory=OrderedDict[object, list[Step]])  # last used: last
    between: Knowledge = field(default_factory=Knowledge)
    after: AfterBackward = field(default_factory=AfterBackward)
    arrivals: GradientWatcher = field(default_factory=GradientWatcher)
    _captures: dict[object, int] = field(default_factory=dict[object, int])
    _in_a_row: dict[object, int] = field(default_factory=dict[object, int])
    _forgot: bool = False
    _kinds: Kinds = field(default_factory=Kinds)
    _code: Code = field(default_factory=Code)
    _numbers: Numbers = field(default_factory=Numbers)
    _stepping: OptimizerStepCost | None = None
    _at_the_step: StepRecheck | None = None

    def __post_init__(self) -> None:
        self.flights = Flights(self.between)

    def set_budget(self, budget: Budget, plan: Plan | None) -> None:
        """Plan for another budget, or run another plan, from the next call on. What is captured stays."""
        self.budget, self.given_plan = budget, plan
        self._forget_plans()

    @property
    def stepping(self) -> OptimizerStepCost | None:
        """The step of the optimizer that was told of, where its state stays in place."""
        if self.optimizer is None or self.offloaded is not None:
            return None
        if self._stepping is None or self._stepping.optimizer is not self.optimizer:
            one_by_one = self.inside is not None and is_of_torch(self.optimizer)
            self._stepping = OptimizerStepCost(self.optimizer, one_by_one=one_by_one)
        return self._stepping

    def _forget_plans(self) -> None:
        """Also those that another thread is making: they are of what was asked for before."""
        self.asked += 1
        self._at_the_step = None
        for step in self.steps():
            step.forget_plans()

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Plan for the state of another optimizer, from the next call on. What is captured stays.

        The state of those that it replaces counts as long as somebody has them.

        Raises:
            UsageError: if the one that it replaces has updated weights inside of a backward, and has not stepped yet.
        """
        if optimizer is not self.optimizer:
            if self.inside is not None and self.inside.updated_and_not_stepped:
                raise UsageError(
                    f'{class_names(self.inside.optimizer)} has updated the weights in the backward (step="inside"), '
                    "and its step has not been called: call it and clear gradients, then tell of the other optimizer",
                    argument="optimizer",
                    value=optimizer,
                )
            replaced = [each for each in self.optimizers if _state_bytes(each) and each is not optimizer]
            self.optimizer, self._stepping, self.stepped_parameters = optimizer, None, None
            self.other_optimizers = weakref.WeakSet(replaced)
            if self.inside is not None:
                self.inside.close()
                self.inside = OptimizerInBackward(optimizer, self.inside.clipping, self.inside.scaler)
            self._forget_plans()

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step weights of the model, maybe one that nobody told of.

        Its state counts from the next call on, and that of one whose place it takes as long as somebody else has it.

        Raises:
            UsageError: if another has stepped these weights inside of a step, and its own step has not been called.
                Nothing has been changed.
            BudgetError: if options have been changed since the last call, for which its budget has no room.
        """
        told = self.optimizer
        if self._at_the_step is not None and self.stepping is not None and told is not None:
            if any(each is optimizer for each in optimizers_in(told)):
                self._at_the_step.refuse_more(self.stepping)
                self._at_the_step = None
        if optimizer is told or (self.inside is None and optimizer in self.other_optimizers):
            return
        if told is not None and any(each is optimizer for each in optimizers_in(told)):
            return
        inside = self.inside
        holds_it = inside is not None and any(each is inside.optimizer for each in optimizers_in(optimizer))
        if inside is not None and not holds_it and inside.updated_and_not_stepped & _parameters_of(optimizer):
            raise UsageError(
                f"another optimizer ({class_names(optimizer)}) is about to step weights that the fitted model's own "
                f'({class_names(inside.optimizer)}) has stepped in the backward (step="inside"), and whose step has '
                "not been called. If the other one takes its place, ebbtide.set_optimizer(model, optimizer) before the "
                "forward says so; if both train these weights, call the step of the model's own first, after its "
                "backward",
                argument="optimizer",
                value=optimizer,
            )
        if optimizer in self.other_optimizers:
            return
        self.other_optimizers.add(optimizer)
        self._met_with[optimizer] = _state_bytes(optimizer)
        if told is not None and self.offloaded is None and _parameters_of(told) <= _parameters_of(optimizer):
            self.other_optimizers.add(told)
            self.optimizer = self._stepping = None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All whose state counts."""
        told = [] if self.optimizer is None else [self.optimizer]
        return [*told, *(each for each in self.other_optimizers if each is not self.optimizer)]

    # -- a call ---------------------------------------------------------------------------------------------

    def look_around(self, call: Call) -> Circumstances:
        """What surrounds ``call``."""
        inputs = watched_in([call.args, call.kwargs]) if call.device == "cpu" else []
        others = {**kept_inputs(), **{each.key: each.bytes for each in inputs}}
        trained, accumulating, own, classes, hooks = walk(call.module)
        resident = start_bytes(own, self.optimizers, others, call.device)
        flying = aloft(self.flights)
        modes = (modes_of(call.module, call.device, trained), self._code.of(classes))
        return Circumstances(
            modes=modes,
            accumulating=accumulating and not self.gradients_stay,
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
            resident_bytes=resident + kept_bytes() + bucket_bytes(call.module) if call.device == "cpu" else resident,
            reached=frozenset(own) if call.device == "cpu" else frozenset(),
            aloft=tuple(flying),
            flying_bytes=sum(each.executable.leaves_bytes for each in flying if each.executable is not None),
            hooked=has_saved_tensor_hooks(),
            repeated=in_backward(),
            hooks=hooks,
            updates=self.inside is not None and not self.inside.accumulates,
        )

    def warn_of_flights(self, now: Circumstances) -> None:
        """Say once that a second forward was not planned for."""
        own = [each for each in now.aloft if each.home is self.flights]
        expected = any(self.between.expects_forwards(each.slot) for each in own)
        if own and not expected and not now.checkpointed:
            self.warn_of_forward("another forward of this model")

    def warn_of_forward(self, what: str) -> None:
        """Say that ``what`` is in flight, without room for this call."""
        warnings.warn(
            f"{what} is in flight: it was planned without room for this one, so this step "
            "may exceed the budget. From the next round on it is planned for. Call backward before the next "
            "forward, or compute what needs no backward under torch.no_grad()",
            stacklevel=users_level(),
        )

    def warn_of_untrained(self) -> None:
        """Say that there is no room for forwards in flight that trained nothing together with another."""
        warnings.warn(
            "forwards of this model have been in flight together without a backward, for which this budget has no "
            "room: where that comes again they may exceed it. Compute what needs no backward under torch.no_grad()",
            stacklevel=users_level(),
        )

    def steps_for(self, call: Call, now: Circumstances) -> Iterator[Step]:
        """Captured steps that may serve a call, then fresh ones. Whoever asks on has found the last one unfit."""
        known = self._steps.get(now.key, [])
        yield from reversed(known.copy())
        refuse_offload_hooks(call.module)
        self.options.progress(Progress(f"capturing the step of {self.plain_class.__name__}"))
        shares = any(step.capture.symbolic and step.capture.other_answer(call) is None for step in known)
        if self.given_plan is None and not shares:
            ways = len({step.capture.way for step in self.steps()})
            another = self.answered_otherwise(call, now) is not None
            shared = self._kinds.capture_for(now.modes, call, self._capture, ways=ways, another_way=another)
            if shared is not None:
                yield Step(shared, verify=self.verify, tiers=self.tiers)
                self._kinds.failed(shared)
        changed = functools.partial(known[-1].capture.changed_for, call) if known else str
        self._refuse_endless(now.key, changed, another_way=self.answered_otherwise(call, now) is not None)
        yield Step(self._capture(call.device, None), verify=self.verify, tiers=self.tiers)

    def knows(self, now: Circumstances) -> bool:
        """Whether a call with the key of this one was captured before."""
        return now.key in self._steps

    def answered_otherwise(self, call: Call, now: Circumstances) -> Question | None:
        """What a call answers otherwise than those of its key that were captured; ``None`` if one went the same way."""
        others = [step.capture.other_answer(call) for step in self._steps.get(now.key, ())]
        return others[-1] if others and None not in others else None

    def retains(self, now: Circumstances) -> bool:
        """Whether a backward of a call like this is known to retain its graph."""
        return self.between.retained(now.slot) is not None

    def expected(self, now: Circumstances) -> frozenset[Slot]:
        """Slots of calls that one at this slot leaves room for."""
        return self.between.expected(now.slot)

    def _capture(self, device: str, changing: tuple[tuple[int, ...], ...] | None) -> Capture:
        known = Answers()
        if changing is not None:  # A shared capture takes the branches that the others took.
            each = [step.capture.answers for step in self.steps()]
            known = Answers(set().union(*(one.compiled for one in each)), any(one.everywhere for one in each))
        name, numbers = self.plain_class.__name__, self._numbers
        return Capture(device=device, name=name, changing=changing, answers=known, numbers=numbers)

    def count_capture(self, now: Circumstances) -> None:
        """A call was captured for itself. One that raises as it does in eager was not."""
        self._captures[now.key] = self._captures.get(now.key, 0) + 1
        self._in_a_row[now.key] = self._in_a_row.get(now.key, 0) + 1

    def _refuse_endless(self, key: object, changed: Callable[[], str], *, another_way: bool) -> None:
        """The call of this key is about to be captured again; ``another_way`` if it answers its branches otherwise."""
        count, in_a_row = self._captures.get(key, 0) + 1, self._in_a_row.get(key, 0) + 1
        most = _MOST_WAYS if another_way else _MOST_IN_A_ROW
        if count != _MANY_CAPTURES and in_a_row <= most:
            return
        what = changed()
        why, remedy = _WAYS if another_way else _CHANGES
        reason = (
            f"{self.plain_class.__name__} has been captured "
            f"{format_count(count - (in_a_row > most), 'time')} for the same inputs: {why}"
        ) + (f". It was captured where {what}, which this call is not" if what else "")
        if in_a_row > most:
            raise CaptureError(f"{reason}. Each of the last {most} calls took seconds", remedy=remedy)
        warnings.warn(
            f"{reason}. Each capture takes seconds, and after {most} in a row calls are refused; {remedy}",
            stacklevel=users_level(),
        )

    def keep(self, step: Step, now: Circumstances) -> None:
        """``step`` is captured, or ran once more."""
        key = now.key
        others = [each for each in self._steps.get(key, ()) if each is not step]
        most = _MOST_WAYS if step.capture.way else _MOST_OF_A_KEY
        self._steps[key] = [*others[1 - most :], step]  # Ctrl-C in between loses no step
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
        self._at_the_step = self._known_of_the_step(step, flight, now)
        if now.checkpointed:
            return
        if now.flying_bytes:
            learn_flight(flight, [each for each in now.aloft if each.number in each.home.in_the_air])
        elif not self._is_measured(now) and not being_watched(now.device):
            learn = functools.partial(self._learn_loss, now, step, self._state_sizes())
            flight.between = BetweenGauge(now.device, learn)
            flight.between.begin()

    def _known_of_the_step(self, step: Step, flight: Flight, now: Circumstances) -> StepRecheck | None:
        if self.stepping is None or flight.executable is None or self.inside is not None or now.checkpointed:
            return None
        hidden = step.hidden_bytes(now.reached) if now.device == "cpu" else 0
        return StepRecheck(
            flight.executable.plan,
            now.resident_bytes + hidden,
            now.trained,
            self.stepping.key(now.trained),
            now.accumulating,
            now.flying_bytes,
            any(map(any, (each.state.values() for each in optimizers_in(self.stepping.optimizer)))),
        )

    def _is_measured(self, now: Circumstances) -> bool:
        """Whether it is known what user code takes outside of the two graphs."""
        return self.between.has_loss_of(now.slot) and self.after.is_known(now.slot, now.hooks)

    def forget(self, step: Step, now: Circumstances) -> None:
        """``step`` is not what a capture with more room would give."""
        self._steps[now.key] = [each for each in self._steps.get(now.key, ()) if each is not step]

    def steps(self) -> list[Step]:
        """All that are captured, at this moment: other threads' calls put what they have used last."""
        return [step for steps in list(self._steps.values()) for step in steps]

    # -- what is learned from a first step ------------------------------------------------------------------

    def _state_sizes(self) -> dict[int, int]:
        """Bytes of the state of each optimizer, by its ``id``."""
        return {id(each): _state_bytes(each) for each in self.optimizers}

    def _learn_loss(
        self,
        now: Circumstances,
        step: Step,
        state: dict[int, int],
        peak_bytes: int,
        left_bytes: int,
        after_bytes: int,
        after_left_bytes: int,
    ) -> None:
        """What user code took between the two graphs of ``step`` (a loss outside, or what is added) and after them.

        ``state`` is what optimizers had before: what they have made since, in hooks, is resident from now on, also
        where as much has been freed meanwhile, such as gradients.
        """
        plan = step.plan
        if plan is None:
            return
        made = 0
        for each in self.optimizers if self.inside is None else ():
            made += _state_bytes(each) - state.get(id(each), self._met_with.get(each, 0))
        self.after.learn(now.slot, now.hooks, plan, after_bytes, max(after_left_bytes, made))
        if self.between.has_loss_of(now.slot):
            return
        tangents = plan.program.late_bytes - plan.program.held_bytes
        if peak_bytes - tangents <= SCALARS_BYTES:  # a loss that is divided or logged
            peak_bytes = left_bytes = 0
        self.between.learn_loss(now.slot, peak_bytes, max(left_bytes - tangents, 0), plan.program)
        total = plan.resident_bytes + plan.boundary_bytes + peak_bytes
        if total > plan.budget_bytes:
            warnings.warn(
                f"code outside the model took {format_bytes(peak_bytes)} between forward and backward, so this first "
                f"step took {format_bytes(total)}, over its budget of {format_bytes(plan.budget_bytes)}; "
                "from the next step on it is planned for",
                stacklevel=users_level(),
            )


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return resident_bytes(map(held_by, optimizers_in(optimizer)))


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(each) for group in optimizer.param_groups for each in group["params"]}
