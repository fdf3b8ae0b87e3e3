"""What is counted of an optimizer in a step: state that is there or will be, and what its own step takes.

1. State that is offloaded is not resident in the step, but for small tensors and those whose memory somebody else uses.
2. At ``optimizer.step()`` all of it is back, beside parameters, gradients, outputs that live still, and what that step
   takes while it runs (``optimizer.cost.step_bytes``). A budget has to have room for that, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ebbtide.errors import BudgetError
from ebbtide.measurement.resident import kept_by, optimizers_in, storages_in, tensors_in
from ebbtide.optimizer.cost.step_bytes import step_bytes
from ebbtide.optimizer.cost.step_end import end_of, remedies_for, scalars_bytes, taken_in_words
from ebbtide.optimizer.state.future_bytes import future_state_bytes, future_state_sizes
from ebbtide.planning.step_end import NOTHING_AFTER, StepEnd
from ebbtide.step.program import Program
from ebbtide.step.provenance import IN_THE_STEP
from ebbtide.units import format_bytes

__all__ = [
    "LEAST_BYTES",
    "Forecast",
    "ahead_in_place",
    "ahead_offloaded",
    "forecast_offload",
    "is_moved",
    "offload_hint",
]

LEAST_BYTES = 64 * 2**10
"""Smaller tensors of state stay."""
_MUCH = 0.1  # of the smallest budget


def is_moved(size: int) -> bool:
    """Whether a tensor of state of so many bytes is large enough to leave."""
    return size >= LEAST_BYTES


@dataclass(frozen=True)
class Forecast:
    """What a plan counts of an optimizer.

    Attributes:
        to_come_bytes: of the state that there is not yet, what will be resident in a step.
        end: what is taken where the optimizer steps.
        note: for people, what moves; empty where none does.
        step_word: for people too, what its step takes where no state moves.
        staying: tensors of its state that are there and resident in a step.
    """

    to_come_bytes: int = 0
    end: StepEnd = NOTHING_AFTER
    note: str = ""
    step_word: str = ""
    staying: Sequence[torch.Tensor] = ()


def forecast_offload(
    optimizer: torch.optim.Optimizer, moving_bytes: int, tier: str, device: str | None = None
) -> Forecast:
    """What is counted of an optimizer of which ``moving_bytes`` of state are away in a step (definition 2).

    Args:
        optimizer: real, or of fake or meta parameters.
        moving_bytes: without what there is not yet.
        tier: by name.
        device: ``"cpu"`` or ``"cuda"``, where the step is to run; some optimizers step otherwise there. ``None`` is
            where the parameters are.
    """
    to_come = future_state_sizes(optimizer)
    moving = moving_bytes + sum(filter(is_moved, to_come))
    taken, slack = step_bytes(optimizer, device), scalars_bytes(optimizer)
    end = StepEnd(
        moving + (taken or 0) + slack,
        moving,
        f"the state of {type(optimizer).__name__}, back from its tier, and what its step makes while it runs",
        remedies_for(optimizer, "take an optimizer that keeps less (SGD, Adafactor)", inside=False),
        slack_bytes=slack,
    )
    word = "not known" if taken is None else format_bytes(taken)
    if moving:
        note = (
            f"{format_bytes(moving)} to the {tier} before the forward and back for optimizer.step(), which takes "
            f"{word} besides; a budget in percent is of the peak with it in place"
        )
    else:
        note = (
            f"nothing: the optimizer keeps no tensor of {format_bytes(LEAST_BYTES)} or more that nobody else uses; "
            f"optimizer.step() takes {word}"
        )
    return Forecast(sum(size for size in to_come if not is_moved(size)), end, note)


def ahead_offloaded(
    optimizer: torch.optim.Optimizer, others: object, device: str | None = None, tier: str = ""
) -> Forecast:
    """What :func:`forecast_offload` would count, without moving anything.

    Args:
        optimizer: as for :func:`forecast_offload`.
        others: whatever holds the model and its arguments: state whose memory is theirs stays.
        device: likewise.
        tier: likewise.
    """
    own, held = storages_in([others]), list(tensors_in([kept_by(each) for each in optimizers_in(optimizer)]))
    away = {key: size for key, size in storages_in(held).items() if is_moved(size) and key not in own}
    staying = [each for each in held if away.keys().isdisjoint(storages_in([each]))]
    return replace(forecast_offload(optimizer, sum(away.values()), tier, device), staying=staying)


def ahead_in_place(optimizer: torch.optim.Optimizer | None, device: str, *, in_backward: bool) -> Forecast:
    """What is counted of an optimizer all of whose state stays; nothing of ``None``.

    Args:
        optimizer: as for :func:`forecast_offload`.
        device: likewise.
        in_backward: whether it steps in the backward.
    """
    if optimizer is None:
        return Forecast()
    forecast = Forecast(future_state_bytes(optimizer), staying=list(tensors_in(optimizer)))
    if in_backward:
        return replace(forecast, step_word=IN_THE_STEP)
    taken = step_bytes(optimizer, device)
    return replace(forecast, end=end_of(optimizer, taken), step_word=taken_in_words(taken))


def offload_hint(
    optimizer: torch.optim.Optimizer, others: object, error: BudgetError, program: Program, resident_bytes: int
) -> Iterator[str]:
    """What moving the state would do for a budget that is too small, if it does much.

    Args:
        optimizer: whose state is in place.
        others: as for :func:`ahead_offloaded`.
        error: the refusal.
        program: of the step.
        resident_bytes: at its start, the state and what is to come of it among them.
    """
    end, smallest = ahead_offloaded(optimizer, others).end, error.smallest_bytes or 0
    without = max(smallest - end.held_bytes, end.needed_bytes(program, resident_bytes - end.held_bytes))
    if without <= (1 - _MUCH) * smallest:
        yield (
            f"{format_bytes(end.held_bytes)} of that are state of {type(optimizer).__name__}, which no op of the model "
            "reads: tiers='disk', options=ebbtide.Options(offload_optimizer=True) (--tiers disk --offload-optimizer; "
            f"host on a card) has it away in the step, and some {format_bytes(without)} will do"
        )
