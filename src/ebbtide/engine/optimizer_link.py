"""The optimizers that train one fitted model: the one that was told of, and others that step or have its weights.

Their state counts as resident, that of the first one before it exists. An optimizer that has steps of its own names
(SAM's ``first_step``) is met by nobody, so before a plan is made all that live are looked through.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from ebbtide.engine.call_context import CallContext
from ebbtide.errors import UsageError
from ebbtide.faults import users_level
from ebbtide.measurement.resident import as_stepping, held_by, optimizers_in, resident_bytes
from ebbtide.optimizer.cost.step_end import OptimizerStepCost, taken_in_words
from ebbtide.optimizer.in_step.optimizer_in_backward import OptimizerInBackward
from ebbtide.optimizer.offload.optimizer_offload import OptimizerOffload
from ebbtide.optimizer.state.combined import class_names, parts_of
from ebbtide.optimizer.state.future_bytes import future_state_bytes
from ebbtide.optimizer.state.options import settings_of
from ebbtide.planning.step_end import StepEnd, end_bytes
from ebbtide.report.plan import Plan
from ebbtide.step.provenance import IN_THE_STEP
from ebbtide.torch_seams.optimizers import is_of_torch, living_optimizers, needs_closure, parameters_stepped_by
from ebbtide.torch_seams.storages import parameters_in
from ebbtide.units import format_bytes

__all__ = ["OptimizerLink"]


class OptimizerLink:
    """What one fitted model knows of its optimizers.

    Args:
        optimizer: whose state counts, also before it exists; ``None`` if no optimizer was told of.
        offloaded: where its state is in a step, if not in place.
        in_backward: the optimizer in its steps, if it is.

    Attributes:
        declared: the optimizer that was told of; ``None`` from where another one steps all that it steps.
        others: that have stepped weights of the model and were not told of: what state they have counts.
        seen: that were there with weights of the model when a plan was made: likewise.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        *,
        offloaded: OptimizerOffload | None = None,
        in_backward: OptimizerInBackward | None = None,
    ) -> None:
        self.declared = optimizer
        self.offloaded = offloaded
        self.in_backward = in_backward
        self.others = weakref.WeakSet[torch.optim.Optimizer]()
        self.seen = weakref.WeakSet[torch.optim.Optimizer]()
        self._said_unknown = weakref.WeakSet[torch.optim.Optimizer]()
        self._unknown: torch.optim.Optimizer | None = None  # what its step takes, as the last plan has found out
        self._state_at_first_step = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        self._stepping: OptimizerStepCost | None = None
        self._planned_with: object = None  # options that the last forward counted on
        self._to_come: tuple[object, int] = (None, 0)
        self._free_bytes = 0  # of the budget of the last forward's plan, when its backward has returned

    @property
    def all(self) -> list[torch.optim.Optimizer]:
        """All whose state counts."""
        declared = [] if self.declared is None else [self.declared]
        return [*declared, *(each for each in self.others | self.seen if each is not self.declared)]

    @property
    def step_cost(self) -> OptimizerStepCost | None:
        """The step of the optimizer that was told of, where its state stays in place."""
        if self.declared is None or self.offloaded is not None:
            return None
        if self._stepping is None or self._stepping.optimizer is not self.declared:
            one_by_one = self.in_backward is not None and is_of_torch(self.declared)
            self._stepping = OptimizerStepCost(self.declared, one_by_one=one_by_one)
        return self._stepping

    @property
    def updates_in_backward(self) -> bool:
        """Whether a backward of a call that this thread makes now applies its gradients."""
        return self.in_backward is not None and not self.in_backward.accumulates

    @property
    def updated_and_not_stepped(self) -> bool:
        """Whether the last backward has updated weights, and their optimizer has not stepped since."""
        return self.in_backward is not None and bool(self.in_backward.updated_and_not_stepped)

    def close(self) -> None:
        """Leave the optimizer as it was: the model is not fitted any more.

        Raises:
            TierError: if its state could not be brought back.
        """
        if self.in_backward is not None:
            self.in_backward.close()
        if self.offloaded is not None:
            self.offloaded.release()

    # -- which optimizers there are ---------------------------------------------------------------------------

    def declare(self, optimizer: torch.optim.Optimizer) -> bool:
        """Count the state of another optimizer; whether it is another.

        The state of those that it replaces counts as long as somebody has them.

        Raises:
            UsageError: if the one that it replaces has updated weights inside of a backward, and has not stepped yet.
        """
        if optimizer is self.declared:
            return False
        if self.in_backward is not None and self.in_backward.updated_and_not_stepped:
            raise UsageError(
                f"{class_names(self.in_backward.optimizer)} has updated the weights in the backward "
                '(step="inside"), and '
                "its step has not been called: call it and clear gradients, and tell of the other optimizer then",
                argument="optimizer",
                value=optimizer,
            )
        replaced = [each for each in self.all if _state_bytes(each) and each is not optimizer]
        self.declared, self._stepping, self._planned_with = optimizer, None, None
        self._to_come = (None, 0)
        self.others = weakref.WeakSet(replaced)
        if self.in_backward is not None:
            self.in_backward.close()
            self.in_backward = OptimizerInBackward(optimizer, self.in_backward.max_norm)
        return True

    def look_for_others(self, module: torch.nn.Module) -> None:
        """Count the state of all optimizers that have weights of ``module``: a plan is about to be made."""
        within = [] if self.declared is None else optimizers_in(self.declared)
        living = living_optimizers(parameters_in(module))
        self.seen = weakref.WeakSet(each for each in living if not any(each is one for one in within))

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer is about to step weights of the model, maybe one that nobody told of.

        Its state counts from the next call on, and that of one whose place it takes as long as somebody else has it.

        Raises:
            UsageError: if another has stepped these weights inside of a step, and its own step has not been called.
                Nothing has been changed.
            UsageError: if options that its step's bytes depend on have been changed since the last call.
        """
        declared = self.declared
        is_declared = declared is not None and (
            optimizer is declared or any(each is optimizer for each in optimizers_in(declared))
        )
        if is_declared and self._planned_with is not None and self.step_cost is not None:
            self.step_cost.refuse_changes(self._planned_with)
            self._planned_with = None
        if is_declared or (self.in_backward is None and optimizer in self.others):
            return
        in_backward = self.in_backward
        holds_it = in_backward is not None and any(each is in_backward.optimizer for each in optimizers_in(optimizer))
        if in_backward is not None and not holds_it and in_backward.updated_and_not_stepped & _parameter_ids(optimizer):
            raise UsageError(
                f"another optimizer ({class_names(optimizer)}) is about to step weights that the fitted model's own "
                f'({class_names(in_backward.optimizer)}) has stepped in the backward (step="inside"), and whose step '
                "has not been called. If the other one takes its place, ebbtide.set_optimizer(model, optimizer) before "
                "the forward says so; if both train these weights, call the step of the model's own first, after its "
                "backward",
                argument="optimizer",
                value=optimizer,
            )
        if optimizer in self.others:
            return
        self.others.add(optimizer)
        self._state_at_first_step[optimizer] = _state_bytes(optimizer)
        if needs_closure(as_stepping(optimizer)):
            self._warn_of_unknown_step(optimizer)
        if declared is not None and self.offloaded is None and _parameter_ids(declared) <= _parameter_ids(optimizer):
            self._warn_of_another(optimizer, declared)
            self.others.add(declared)
            self.declared = self._stepping = self._planned_with = None

    def _warn_of_another(self, optimizer: torch.optim.Optimizer, declared: torch.optim.Optimizer) -> None:
        """Say that ``optimizer``, where ``declared`` was told of, makes state for which the step has no room."""
        if any(each is declared for each in optimizers_in(optimizer)):
            return
        try:
            made = future_state_bytes(optimizer)
        except UsageError:  # nobody can foresee it
            return
        if made > self._free_bytes:
            warnings.warn(
                f"{class_names(optimizer)} steps weights in the place of {class_names(declared)}, which was told of: "
                f"it makes {format_bytes(made)} of state, and this step's budget has room for "
                f"{format_bytes(self._free_bytes)}. From the next step on it counts. "
                "ebbtide.set_optimizer(model, optimizer) before the forward tells of it",
                stacklevel=users_level(),
            )

    def _warn_of_unknown_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Say once that what the step of ``optimizer`` takes while it runs is in no budget."""
        if optimizer in self._said_unknown:
            return
        self._said_unknown.add(optimizer)
        inside = ", and the model's steps within it," if needs_closure(as_stepping(optimizer)) else ""
        weights = sum(each.nbytes for each in parameters_stepped_by(optimizer))
        warnings.warn(
            f"what {class_names(optimizer)} takes while it steps cannot be found out: its state counts once it is "
            f"there, and its temporaries never, so that its step{inside} may exceed the budget by them. Leave room for "
            f"a few times its weights ({format_bytes(weights)}) in the budget",
            stacklevel=users_level(),
        )

    # -- what they keep, and will keep --------------------------------------------------------------------------

    def state_sizes(self) -> dict[int, int]:
        """Bytes of the state of each optimizer, by its ``id``."""
        return {id(each): _state_bytes(each) for each in self.all}

    def made_since(self, sizes: dict[int, int]) -> int:
        """Bytes of state that were made since :meth:`state_sizes` gave ``sizes``; 0 of an optimizer in the step."""
        if self.in_backward is not None:
            return 0
        return sum(
            _state_bytes(each) - sizes.get(id(each), self._state_at_first_step.get(each, 0)) for each in self.all
        )

    def state_to_come_bytes(self) -> int:
        """What the optimizer that was told of will make in its next step and keep through a training step."""
        if self.declared is None:
            return 0
        if self.offloaded is not None:
            return self.offloaded.forecast.to_come_bytes
        key = [_state_depends_on(as_stepping(each)) for each in parts_of(self.declared)]
        if self._to_come[0] != key:
            self._to_come = (key, future_state_bytes(self.declared))
        return self._to_come[1]

    # -- what its step takes ------------------------------------------------------------------------------------

    def end_of(self, now: CallContext) -> StepEnd | None:
        """What is taken where the optimizer steps after a call; ``None`` if it does inside, or is not known."""
        if self.offloaded is not None:
            end = self.offloaded.forecast.end
        elif (step := self.step_cost) is not None and (step.one_by_one or not now.updates):
            end = step.end(now.trained)
        else:
            return None
        return replace(end, summed=now.accumulating, gone_bytes=now.flying_bytes)

    def step_in_words(self, now: CallContext) -> str:
        """What is counted of the step of the optimizer that was told of."""
        if now.updates:
            return IN_THE_STEP
        if (step := self.step_cost) is None:
            return ""
        taken = step.taken_bytes(now.trained)
        self._unknown = step.optimizer if taken is None else None
        return taken_in_words(taken)

    def forward_ran(self, now: CallContext, plan: Plan) -> None:
        """Note with which options a forward ran under ``plan``: others before the optimizer's step are refused."""
        if (unknown := self._unknown) is not None:
            self._unknown = None
            self._warn_of_unknown_step(unknown)
        self._free_bytes = max(plan.budget_bytes - plan.resident_bytes - end_bytes(plan.program), 0)
        step = self.step_cost
        counts = step is not None and self.in_backward is None and not now.checkpointed
        self._planned_with = step.options() if step is not None and counts else None

    # -- in words -----------------------------------------------------------------------------------------------

    @property
    def names(self) -> str:
        """Classes of all whose state counts."""
        met = [each for each in self.all if each is self.declared or each in self.others]
        return _names_of([*met, *(each for each in self.seen if _state_bytes(each))])

    def advice_to_declare(self) -> Iterator[str]:
        """What a refusal says of optimizers that have come after the first plan."""
        if self.declared is None and self.others:
            yield (
                f"The state of {self.names} counts since its first step. optimizer= of ebbtide.fit, or "
                "ebbtide.set_optimizer(model, optimizer), tells of it before, so that a budget without room for it is "
                "refused before training"
            )


def _state_depends_on(optimizer: torch.optim.Optimizer) -> object:
    """What changes where state is still to come: which there is, parameters, and options."""
    trained = [each.requires_grad for each in parameters_stepped_by(optimizer)]
    return len(optimizer.state), len(trained), sum(trained), settings_of(*optimizer.param_groups)


def _names_of(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    return " and ".join(sorted({class_names(each) for each in optimizers}))


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return resident_bytes(map(held_by, optimizers_in(optimizer)))


def _parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return set(map(id, parameters_stepped_by(optimizer)))
