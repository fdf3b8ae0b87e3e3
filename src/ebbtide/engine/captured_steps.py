"""The captured steps of one fitted model: which may serve a call, and when a new one is captured.

1. A call's *key* is what its step depends on as far as that can be read off the call (``key``). Torch's guards know
   the rest, so a key may have several steps, of which the one used last is tried first. Of more than
   :data:`MOST_STEPS` in all, those used longest ago go.
2. From the second length or third batch of one kind of call on, steps share a symbolic capture (``shared_calls``).
3. A key that is captured again and again, each time for one call, is refused after a while: captures take seconds.
"""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ebbtide.capture.numbers import Numbers
from ebbtide.engine.call_context import CallContext
from ebbtide.engine.compiled import Call, Capture
from ebbtide.engine.configuration import Configuration
from ebbtide.engine.freed_graphs import FreedGraphs
from ebbtide.engine.offload_hooks import refuse_offload_hooks
from ebbtide.engine.sharded import refuse_sharded
from ebbtide.engine.shared_calls import Kinds
from ebbtide.engine.step import Step
from ebbtide.errors import CaptureError
from ebbtide.faults import users_level
from ebbtide.planners import Progress
from ebbtide.report.plan import Plan
from ebbtide.torch_seams.eager_answers import Answers
from ebbtide.torch_seams.input_branches import Question
from ebbtide.units import format_count

__all__ = ["CapturedSteps"]

MOST_STEPS = 256  # captured steps kept of one model: 5 to 20 MiB each of the process' own memory, not of the budget
_MOST_OF_A_KEY = 8
_MOST_BRANCHES = 64  # captures of one key that differ by what branches on their inputs were answered
MOST_IN_A_ROW = 16  # captures of one key of which none served a second call, after which the next is refused
_MANY_CAPTURES = 8  # captures of one key after which it is said that something changes at every call

_CHANGES = (
    "something that its step depends on changes between calls (a weight that is annealed, a number that counts steps, "
    "a list or a dictionary that grows)",
    "keep such numbers in tensors (model.weight = torch.tensor(0.3), or register_buffer), and append to lists outside "
    "of the forward, where its outputs are at hand",
)
_BRANCHES = (
    "values of its inputs decide its branches, and calls go many ways",
    "compute without branches (torch.where), or decide outside of the model",
)
"""Why a call is captured again and again, and what to do."""


@dataclass
class _Counted:
    """Captures of one key: how many there were, and how many of them in a row served no second call."""

    captures: int = 0
    in_a_row: int = 0


@dataclass(kw_only=True, eq=False)
class CapturedSteps:
    """All that are captured of one model.

    Attributes:
        name: of the model's class.
        configuration: how the model was fitted.
        freed_graphs: calls that are no step, since they free their own graph.
    """

    name: str
    configuration: Configuration
    freed_graphs: FreedGraphs = field(default_factory=FreedGraphs)
    _steps: OrderedDict[object, list[Step]] = field(default_factory=OrderedDict[object, list[Step]])  # last used: last
    _counted: dict[object, _Counted] = field(default_factory=dict[object, _Counted])
    _not_graphs: set[object] = field(default_factory=set[object])
    _kinds: Kinds = field(default_factory=Kinds)
    _numbers: Numbers = field(default_factory=Numbers)
    _forgot: bool = False

    # -- which step serves a call -------------------------------------------------------------------------------

    def candidate(self, call: Call, now: CallContext, rejected: Collection[Step], *, may_share: bool) -> Step:
        """A step that may serve ``call``: one that is captured, the one used last first, or a new one.

        Args:
            call: of the model.
            now: what surrounds it.
            rejected: steps that were found not to serve it.
            may_share: whether a new one may be for other shapes too.

        Raises:
            CaptureError: if the key of the call has been captured too often.
            UsageError: if hooks that move weights are on the model, or its parameters are shards.
        """
        known = self._steps.get(now.key, [])
        for step in reversed(known):
            if step not in rejected:
                return step
        refuse_offload_hooks(call.module)
        refuse_sharded(call.module, (call.args, call.kwargs))
        self.configuration.planning.progress(Progress(f"capturing the step of {self.name}"))
        other = self.answered_otherwise(call, now)
        shared_already = any(
            step.piece.capture.symbolic and step.piece.capture.other_answer(call) is None for step in known
        )
        failed = any(step.piece.capture.symbolic and step not in known for step in rejected)
        if may_share and not shared_already and not failed:
            branches = len({step.piece.capture.branches for step in self.all()})
            shared = self._kinds.capture_for(
                now.modes, call, self._capture, branches=branches, another_way=other is not None
            )
            if shared is not None:
                return self._step_of(shared)
        changed = functools.partial(known[-1].piece.capture.changed_for, call) if known else str
        self._refuse_endless(now.key, changed, another_way=other is not None)
        return self._step_of(self._capture(call.device, None))

    def _step_of(self, capture: Capture) -> Step:
        return Step(capture, verify=self.configuration.verify, tiers=self.configuration.tiers)

    def _capture(self, device: str, changing: tuple[tuple[int, ...], ...] | None) -> Capture:
        known = Answers()
        if changing is not None:  # A shared capture takes the branches that the others took.
            each = [step.piece.capture.answers for step in self.all()]
            known = Answers(set().union(*(one.compiled for one in each)), any(one.everywhere for one in each))
        return Capture(device=device, name=self.name, changing=changing, answers=known, numbers=self._numbers)

    def reject(self, step: Step, now: CallContext) -> None:
        """Note that ``step`` does not serve a call after all; a new one that is shared may serve no other either."""
        if step.piece.capture.symbolic and step not in self._steps.get(now.key, ()):
            self._kinds.failed(step.piece.capture)

    def knows(self, now: CallContext) -> bool:
        """Whether a call with the key of this one was captured before."""
        return now.key in self._steps

    def answered_otherwise(self, call: Call, now: CallContext) -> Question | None:
        """What a call answers otherwise than those of its key that were captured; ``None`` if one went the same way."""
        others = [step.piece.capture.other_answer(call) for step in self._steps.get(now.key, ())]
        return others[-1] if others and None not in others else None

    # -- what is kept -------------------------------------------------------------------------------------------

    def keep(self, step: Step, now: CallContext) -> None:
        """Keep ``step``, which is captured or ran once more, as the one used last."""
        key = now.key
        others = [each for each in self._steps.get(key, ()) if each is not step]
        most = _MOST_BRANCHES if step.piece.capture.branches else _MOST_OF_A_KEY
        self._steps[key] = [*others[1 - most :], step]  # Ctrl-C in between loses no step
        self._steps.move_to_end(key)
        if len(self._steps) <= MOST_STEPS:
            return
        oldest = next(iter(self._steps))
        del self._steps[oldest]
        self._counted.pop(oldest, None)
        if not self._forgot:
            self._forgot = True
            warnings.warn(
                f"{self.name} has been called with more than {MOST_STEPS} kinds of arguments; those "
                "used longest ago are forgotten and captured again when they come back, which takes seconds. Pad "
                "lengths to multiples of 8 or 16 to have fewer shapes",
                stacklevel=users_level(),
            )

    def forget(self, step: Step, now: CallContext) -> None:
        """Forget ``step``: it is not what a capture with more room would give."""
        self._steps[now.key] = [each for each in self._steps.get(now.key, ()) if each is not step]

    def all(self) -> list[Step]:
        """All that are captured, at this moment: other threads' calls put what they have used last."""
        return [step for steps in list(self._steps.values()) for step in steps]

    def plans(self) -> list[Plan]:
        """The plans at hand of all steps."""
        return [plan for step in self.all() for plan in step.plans()]

    def forget_plans(self) -> None:
        """Plan every step anew: what was asked for has changed."""
        for step in self.all():
            step.forget_plans()

    def is_no_graph(self, now: CallContext) -> bool:
        """Whether calls like this have nothing to train and are no graph either."""
        return now.key in self._not_graphs

    def note_no_graph(self, now: CallContext) -> None:
        """Note that calls like this have nothing to train and are no graph either: they run as they are."""
        self._not_graphs.add(now.key)

    # -- captures without end -----------------------------------------------------------------------------------

    def count_capture(self, now: CallContext) -> None:
        """Count that a call was captured for itself. One that raises as it does in eager was not."""
        counted = self._counted.setdefault(now.key, _Counted())
        counted.captures += 1
        counted.in_a_row += 1

    def served_again(self, now: CallContext) -> None:
        """Note that a capture has served a second call."""
        if (counted := self._counted.get(now.key)) is not None:
            counted.in_a_row = 0

    def _refuse_endless(self, key: object, changed: Callable[[], str], *, another_way: bool) -> None:
        """Refuse to capture a key too often; ``another_way`` if the call answers its branches otherwise."""
        counted = self._counted.get(key, _Counted())
        count, in_a_row = counted.captures + 1, counted.in_a_row + 1
        most = _MOST_BRANCHES if another_way else MOST_IN_A_ROW
        if count != _MANY_CAPTURES and in_a_row <= most:
            return
        what = changed()
        why, remedy = _BRANCHES if another_way else _CHANGES
        reason = (
            f"{self.name} has been captured "
            f"{format_count(count - (in_a_row > most), 'time')} for the same inputs: {why}"
        ) + (f". It was captured where {what}, which this call is not" if what else "")
        if in_a_row > most:
            raise CaptureError(f"{reason}. Each of the last {most} calls took seconds", remedy=remedy)
        warnings.warn(
            f"{reason}. Each capture takes seconds, and after {most} in a row calls are refused; {remedy}",
            stacklevel=users_level(),
        )
