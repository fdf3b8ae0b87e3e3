"""Whether each step stays within its budget: which steps are recorded, and what follows where one goes over.

1. On CUDA the allocator's peak is read at every step. It is the step's own if the step has raised it, and tells nothing
   if it was above the budget before: then it is reset, and given back, in the steps of the sample.
2. On CPU a record costs as much as a small step. So a *sample* of the steps of each call slot is recorded: the first,
   second, fourth, eighth and so on, from the hundredth on every hundredth. One in which nothing can be recorded,
   because a profiler runs or other threads train, is made up for by the next. All others are judged by what is
   resident when they begin, which includes what models have returned and user code keeps (``measurement.leftovers``),
   and by the process: where it has taken more memory than ever since the last call, the next step is recorded.
3. What a step over its budget took is learned, so that its plan does not hold for the next one. Where the plan would
   hold all the same, since it is its own ops that took more than they are priced at, the excess is put aside.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ebbtide.engine.call_context import CallContext
from ebbtide.engine.executor import being_watched
from ebbtide.engine.first_runs import Phase
from ebbtide.engine.key import CallSlot
from ebbtide.engine.known_windows import Cleared
from ebbtide.engine.learned import Learned
from ebbtide.engine.optimizer_link import OptimizerLink
from ebbtide.engine.pending_steps import PendingStep
from ebbtide.errors import BudgetExceeded
from ebbtide.faults import users_level
from ebbtide.measurement.card_peaks import levels
from ebbtide.measurement.leftovers import watches_of
from ebbtide.measurement.process import highest_bytes
from ebbtide.measurement.step_record import Before, Part, StepRecord, ask_to_record
from ebbtide.planning.step_end import SCALARS_BYTES, end_bytes
from ebbtide.ranks.member import ALONE
from ebbtide.report.plan import Plan
from ebbtide.torch_seams.optimizers import gradient_of
from ebbtide.torch_seams.storages import parameters_in
from ebbtide.units import format_allowed, format_bytes

__all__ = ["Judge"]

_SLACK_BYTES = 2**10
"""For single numbers that user code makes in a step, such as a scaled loss and its gradient."""
_FROM_NOW_ON = ". From the next step on there is room for it, or the budget is refused"
_OF_GRAPHS = (Part.FORWARD, Part.BACKWARD, Part.AGAIN)
_EVERY = 100
_RISE, _LEAST_RISE_BYTES = 16, 2**20
"""A part of the budget, and the least, by which the process has to rise for a step to be recorded."""
_MOST_TRIES = 3
"""Records in a row that come to nothing, of forwards without a backward, before the next is waited for."""


@dataclass(slots=True)
class _Sample:
    """How many steps of a slot there were, and the next one that is recorded (definition 2).

    Attributes:
        steps: how many there were.
        due: the next that is recorded.
        tries: records in a row that came to nothing.
        gauged: whether the last that was due was measured instead, if nothing has disturbed that.
        known_with: hooks on parameters with which it is known what user code takes.
    """

    steps: int = 0
    due: int = 1
    tries: int = 0
    gauged: bool = False
    known_with: tuple[int, ...] | None = None

    def begins(self) -> None:
        """A step is recorded; until it ends so is the next."""
        self.tries += 1
        if self.tries >= _MOST_TRIES:
            self.ended()

    def ended(self) -> None:
        """It was recorded to its end."""
        self.tries = 0
        doubled = 1 << self.steps.bit_length()
        self.due = min(doubled, _EVERY) if self.steps < _EVERY else (self.steps // _EVERY + 1) * _EVERY


@dataclass(eq=False)
class Judge:
    """Judges the steps of one model.

    Attributes:
        learned: of the code around its steps.
        tell: called with what is about to be raised, which other ranks are to know.
    """

    learned: Learned
    tell: Callable[[BaseException], None] = ALONE.tell
    _samples: dict[CallSlot, _Sample] = field(default_factory=dict[CallSlot, _Sample])
    _recorded: weakref.ref[PendingStep] | None = None  # the last
    _high_bytes: int = 0  # that the process had at the last call
    _verdict: BudgetExceeded | str = ""
    _said: set[tuple[CallSlot, Part]] = field(default_factory=set[tuple[CallSlot, Part]])

    def call_begins(self) -> None:
        """End a record that has gone on after its step, and say what has not been said.

        Raises:
            BudgetExceeded: if a step went over its budget and violations raise.
        """
        recorded = None if self._recorded is None else self._recorded()
        if recorded is not None and not recorded.is_pending:
            recorded.measuring.end_record()
            self._recorded = None
        self._say()

    def end(self) -> None:
        """The model is not fitted any more."""
        if self._recorded is not None and (recorded := self._recorded()) is not None:
            recorded.measuring.end_record()

    def watch(
        self,
        pending: PendingStep,
        now: CallContext,
        *,
        resident_bytes: int,
        before: Before,
        optimizers: OptimizerLink,
        still_holds: Callable[[], bool],
        on_violation: Literal["replan", "raise"],
        given: bool,
    ) -> None:
        """Have ``pending``, which is about to run, recorded if it is to be judged (definitions 1 and 2).

        Args:
            pending: it.
            now: what surrounds its call.
            resident_bytes: before it.
            before: what is known of the blocks of the model's other pending steps.
            optimizers: of the model.
            still_holds: whether its plan, by what is known, would hold for such a call again.
            on_violation: what follows if it goes over its budget.
            given: whether its plan is the user's.
        """
        slot, executable, learned = now.call_slot, pending.executable, self.learned
        alone = not now.flying_bytes
        if now.checkpointed or executable is None or not (alone or now.was_expected):
            return  # of one that nobody expected it is said already that it may exceed the budget
        sample = self._samples.setdefault(slot, _Sample())
        sample.steps += 1
        if now.device == "cpu" and self._has_risen(executable.plan.budget_bytes):
            sample.due = min(sample.due, sample.steps)
        if alone and sample.known_with != now.hooks and learned.is_known(slot, now.hooks):
            sample.known_with = now.hooks
        news = alone and (sample.known_with != now.hooks or not learned.windows.knows_after_retained(slot))
        due = news or sample.due <= sample.steps
        if now.device == "cpu" and (due or executable.first_runs.phase is Phase.MEASURING):
            ask_to_record()
        if now.device == "cpu" and (not due or being_watched(now.device)):
            return
        if pending.measuring.gauge is not None:
            sample.gauged = not news and not sample.gauged
            if sample.gauged:
                return  # its graphs are measured, if nothing disturbs that; if it does, the next is recorded
            pending.measuring.gauge = None
        if due:
            sample.begins()
        on_cpu, sizes = now.device == "cpu", optimizers.state_sizes() if news else None
        leaves = (each for each in parameters_in(now.module) if on_cpu and each.is_leaf)
        hooks, retained = now.hooks, learned.windows.retained(slot)

        def done(record: StepRecord) -> None:
            if not record.is_whole:
                return
            if due:
                sample.ended()
            made = 0 if sizes is None else optimizers.made_since(sizes)
            plan = executable.plan
            over = record.highest_bytes - plan.budget_bytes
            if news or over > _SLACK_BYTES:
                learned.learn(slot, hooks, plan.program, made, record.parts, alone=alone)
            if over > _SLACK_BYTES:
                sample.due = sample.steps + 1
                part, there = _what_grew(record, plan), learned.windows.retained(slot)
                news_then = there is not None and (retained is None or retained.again != there.again)
                kept = executable.validity.cleared_bytes and learned.windows.cleared(slot) is Cleared.KEPT
                if on_violation == "replan" and part in _OF_GRAPHS and (news_then or kept):
                    return  # said when the backward began
                if not given and still_holds():  # what it leaves free is put aside too, or it would come again
                    free = plan.budget_bytes - plan.predicted_peak_bytes - plan.reserve_bytes
                    learned.put_aside(slot, over + max(free, 0))
                self._exceeded(slot, plan, record, on_violation, given=given)
            elif news and (counted := _counted(record, plan)) > plan.budget_bytes:
                self._verdict = (
                    f"{_in_words(_what_grew(record, plan), record, plan)}, so that such steps count as "
                    f"{format_bytes(counted)}, over their budget of {format_allowed(plan.budget_bytes)}{_FROM_NOW_ON}"
                )

        pending.measuring.record = StepRecord(
            now.device,
            start_bytes=resident_bytes,
            freed=watches_of(each for each in map(gradient_of, leaves) if each is not None),
            before=before,
            resets=due and not on_cpu and (news or levels()[0] > executable.plan.budget_bytes),
            done=done,
            returned=self._say,
        )
        self._recorded = weakref.ref(pending)

    def _has_risen(self, budget_bytes: int) -> bool:
        """Whether the process has taken more than ever since this was asked last, by a part of a budget (``_RISE``)."""
        before, self._high_bytes = self._high_bytes, highest_bytes()
        return self._high_bytes - before > max(budget_bytes // _RISE, _LEAST_RISE_BYTES)

    def _exceeded(
        self,
        slot: CallSlot,
        plan: Plan,
        record: StepRecord,
        on_violation: Literal["replan", "raise"],
        *,
        given: bool,
    ) -> None:
        """Find words for a step that went over its budget."""
        peak = record.highest_bytes
        part = _what_grew(record, plan)
        if given and (slot, part) in self._said:
            return
        self._said.add((slot, part))
        what = (
            f"{_in_words(part, record, plan)}, so that this step took {format_bytes(peak)}, over its budget of "
            f"{format_allowed(plan.budget_bytes)}; its plan predicted {format_bytes(plan.predicted_peak_bytes)}"
        )
        if on_violation == "raise":
            self._verdict = BudgetExceeded(
                f'{what}. Ask for more, or for on_violation="replan", which plans the next step with room for it',
                budget_bytes=plan.budget_bytes,
                measured_peak_bytes=peak,
            )
        elif given:
            self._verdict = f"{what}. Its plan was given, so that later steps may do so again"
        else:
            self._verdict = f"{what}{_FROM_NOW_ON}"

    def _say(self) -> None:
        verdict, self._verdict = self._verdict, ""
        if isinstance(verdict, BudgetExceeded):
            self.tell(verdict)
            raise verdict
        if verdict:
            warnings.warn(verdict, stacklevel=users_level())


def _counted(record: StepRecord, plan: Plan) -> int:
    """What a step takes by its plan's figures, with what user code was seen to take: no less than it took itself."""
    window, after = record.parts[Part.WINDOW].own_peak_bytes, record.parts[Part.AFTER].peak_bytes
    counted = 0
    if window > SCALARS_BYTES + plan.program.late_bytes - plan.program.held_bytes:
        counted = plan.boundary_bytes + window
    if after > SCALARS_BYTES:
        counted = max(counted, end_bytes(plan.program) + after)
    return plan.resident_bytes + counted


def _what_grew(record: StepRecord, plan: Plan) -> Part:
    """The part that took a step over its budget. What user code keeps from between the graphs stays below it."""
    if record.highest_bytes <= plan.budget_bytes:
        return max((Part.WINDOW, Part.AFTER), key=lambda each: record.parts[each].peak_bytes)
    highest = max(record.parts, key=lambda each: record.parts[each].highest_bytes)
    program = plan.program
    kept = record.parts[Part.WINDOW].left_bytes - (program.late_bytes - min(program.held_bytes, 0))
    over = record.highest_bytes - plan.budget_bytes
    return Part.WINDOW if highest is not Part.FORWARD and kept >= over else highest


def _in_words(part: Part, record: StepRecord, plan: Plan) -> str:
    taken = record.parts[part]
    size = format_bytes(taken.peak_bytes)
    match part:
        case Part.WINDOW:
            known = format_bytes(plan.program.between_bytes)
            return f"code outside the model took {size} between forward and backward ({known} were planned for)"
        case Part.FORWARD | Part.BACKWARD:
            above = format_bytes(taken.highest_bytes - record.parts[Part.FORWARD].start_bytes)
            return f"{part.value} took up to {above} above the step's start"
        case Part.AFTER:
            return f"{part.value}, took {size} after the planned backward"
        case _:
            return f"{part.value} took {size}"
