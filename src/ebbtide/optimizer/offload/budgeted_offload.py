"""An optimizer whose state is away while a step runs: what that leaves to be counted, and what its own step takes.

1. The state leaves before a training call looks around (``offload.optimizer_offload``), so it is not resident in the
   step, but for small tensors and those whose memory somebody else uses.
2. At ``optimizer.step()`` all of it is back, beside parameters, gradients, outputs that live still, and what that step
   takes while it runs (``optimizer.cost.step_bytes``). A budget has to have room for that, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ebbtide.errors import BudgetError
from ebbtide.measurement.resident import kept_by, optimizers_in, storages_in, tensors_in
from ebbtide.optimizer.cost.step_bytes import step_bytes
from ebbtide.optimizer.cost.step_end import less_at_once, scalars_bytes
from ebbtide.optimizer.offload.optimizer_offload import LEAST_BYTES, OptimizerOffload, is_moved, offload_of
from ebbtide.optimizer.state.future_bytes import future_state_sizes
from ebbtide.planning.step_end import StepEnd
from ebbtide.step.program import Program
from ebbtide.transfers.paths import TransferPath
from ebbtide.transfers.traffic import Traffic
from ebbtide.units import format_bytes

__all__ = ["BudgetedOffload", "OffloadForecast", "forecast_offload", "offload_hint"]

_MUCH = 0.1  # of the smallest budget


class BudgetedOffload:
    """Definition 1, of one fitted model.

    Args:
        optimizer: given to ``fit``.
        way: the tier that its state moves to.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, path: TransferPath) -> None:
        self._optimizer = optimizer
        self._offload: OptimizerOffload = offload_of(optimizer, path)
        self._last: tuple[object, int, int, int | None] = (None, 0, 0, 0)

    def leave(self) -> None:
        """A training call begins.

        Raises:
            TierError: if the tier has no room or fails; the state is where it was.
        """
        self._offload.send()

    def close(self) -> None:
        """The model is not fitted any more."""
        self._offload.end()

    @property
    def traffic(self) -> Traffic:
        """What has moved since the state left last."""
        return self._offload.traffic

    @property
    def resident_to_come_bytes(self) -> int:
        """Of the state that there is not yet, what will stay."""
        return self._look()[0]

    @property
    def end(self) -> StepEnd:
        """Definition 2."""
        _, moving, taken = self._look()
        return end_of_step(self._optimizer, moving, taken)

    @property
    def note(self) -> str:
        """For people: what is counted of it."""
        _, moving, taken = self._look()
        return note_of(moving, taken, self._offload.path.name)

    def _look(self) -> tuple[int, int, int | None]:
        offload = self._offload
        key = (_outline(self._optimizer), offload.moving_bytes)
        if self._last[0] != key:
            to_come = future_state_sizes(self._optimizer)
            staying = sum(size for size in to_come if not is_moved(size))
            moving = offload.moving_bytes + sum(filter(is_moved, to_come))
            self._last = (key, staying, moving, step_bytes(self._optimizer))
        return self._last[1:]


def end_of_step(optimizer: torch.optim.Optimizer, moving_bytes: int, taken_bytes: int | None) -> StepEnd:
    """Definition 2, of ``moving_bytes`` of state and ``taken_bytes`` while the optimizer steps."""
    slack = scalars_bytes(optimizer)
    return StepEnd(
        moving_bytes + (taken_bytes or 0) + slack,
        moving_bytes,
        f"the state of {type(optimizer).__name__}, back from its tier, and what its step makes while it runs",
        f"take an optimizer that keeps less (SGD, Adafactor){less_at_once(optimizer)}",
        slack_bytes=slack,
    )


def note_of(moving_bytes: int, taken_bytes: int | None, tier: str) -> str:
    """For people: what is counted of an optimizer's state that moves to ``tier``."""
    taken = "not known" if taken_bytes is None else format_bytes(taken_bytes)
    if not moving_bytes:
        return (
            f"nothing: the optimizer keeps no tensor of {format_bytes(LEAST_BYTES)} or more that nobody else uses; "
            f"optimizer.step() takes {taken}"
        )
    return (
        f"{format_bytes(moving_bytes)} to the {tier} before the forward and back for optimizer.step(), which takes "
        f"{taken} besides; a budget in percent is of the peak with it in place"
    )


@dataclass(frozen=True)
class OffloadForecast:
    """An optimizer whose state is to be away in a step that is planned ahead of time.

    Attributes:
        staying: tensors of its state that there are and that stay.
        to_come_bytes: of the state that there is not yet, what will stay.
        end: definition 2.
        note: for people.
        step_word: for people too, what its step takes where no state is away.
    """

    staying: list[torch.Tensor]
    to_come_bytes: int
    end: StepEnd
    note: str
    step_word: str = ""


def forecast_offload(
    optimizer: torch.optim.Optimizer, others: object, device: str | None, tier: str
) -> OffloadForecast:
    """What :class:`BudgetedOffload` would find, without moving anything.

    Args:
        optimizer: real, or of fake or meta parameters.
        others: whatever holds the model and its arguments: state whose memory is theirs stays.
        device: ``"cpu"`` or ``"cuda"``, where the step is to run; some optimizers step otherwise there. ``None`` is
            where the parameters are.
        tier: by name.
    """
    own, held = storages_in([others]), list(tensors_in([kept_by(each) for each in optimizers_in(optimizer)]))
    state = storages_in(held)
    away = {key for key, size in state.items() if is_moved(size) and key not in own}
    to_come = future_state_sizes(optimizer)
    moving = sum(state[key] for key in away) + sum(filter(is_moved, to_come))
    taken = step_bytes(optimizer, device)
    return OffloadForecast(
        [each for each in held if away.isdisjoint(storages_in([each]))],
        sum(size for size in to_come if not is_moved(size)),
        end_of_step(optimizer, moving, taken),
        note_of(moving, taken, tier),
    )


def offload_hint(
    optimizer: torch.optim.Optimizer, others: object, error: BudgetError, program: Program, resident_bytes: int
) -> Iterator[str]:
    """What moving the state would do for a budget that is too small, if it does much.

    Args:
        optimizer: whose state is in place.
        others: as for :func:`forecast_offload`.
        error: the refusal.
        program: of the step.
        resident_bytes: at its start, the state and what is to come of it among them.
    """
    end, smallest = forecast_offload(optimizer, others, None, "").end, error.smallest_bytes or 0
    without = max(smallest - end.held_bytes, end.needed_bytes(program, resident_bytes - end.held_bytes))
    if without <= (1 - _MUCH) * smallest:
        yield (
            f"{format_bytes(end.held_bytes)} of that are state of {type(optimizer).__name__}, which no op of the model "
            "reads: tiers='disk', offload_optimizer=True (--tiers disk --offload-optimizer; host on a card) has it "
            f"away in the step, and some {format_bytes(without)} will do"
        )


def _outline(optimizer: torch.optim.Optimizer) -> list[object]:
    """What its state and its step depend on, as far as it changes between two steps; numbers such as rates do not."""
    outline: list[object] = [len(each.state) for each in optimizers_in(optimizer)]
    for group in optimizer.param_groups:
        outline += [(id(each), each.requires_grad) for each in group["params"]]
        settings = [(name, bool(value)) for name, value in group.items() if isinstance(value, bool | float | None)]
        outline += settings
    return outline
