"""An optimizer whose state is away while a step runs: what that leaves to be counted, and what its own step takes.

1. The state leaves before a training call looks around (``transfers.parked``), so it is not resident in the step, but
   for small tensors and those whose memory somebody else uses.
2. At ``optimizer.step()`` all of it is back, beside parameters, gradients, outputs that live still, and what that step
   takes while it runs (``measurement.optimizer_step``). A budget has to have room for that, whatever the plan.
"""

from __future__ import annotations

import torch

from ebbflow.engine.executable import SCALARS_BYTES
from ebbflow.measurement.optimizer_state import future_state_sizes
from ebbflow.measurement.optimizer_step import step_bytes
from ebbflow.measurement.resident import optimizers_in
from ebbflow.transfers.parked import LEAST_BYTES, Parking, moves, parking_of
from ebbflow.transfers.traffic import Traffic
from ebbflow.transfers.ways import Way
from ebbflow.units import format_bytes

__all__ = ["Offloaded"]


class Offloaded:
    """Definition 1, of one fitted model.

    Args:
        optimizer: given to ``fit``.
        way: the tier that its state moves to.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, way: Way) -> None:
        self._optimizer = optimizer
        self._parking: Parking = parking_of(optimizer, way)
        self._known: tuple[object, int, int, int | None] = (None, 0, 0, 0)

    def leave(self) -> None:
        """A training call begins.

        Raises:
            TierError: if the tier has no room or fails; the state is where it was.
        """
        self._parking.leave()

    def end(self) -> None:
        """The model is not fitted any more."""
        self._parking.end()

    @property
    def traffic(self) -> Traffic:
        """What has moved since the state left last."""
        return self._parking.traffic

    @property
    def resident_to_come_bytes(self) -> int:
        """Of the state that there is not yet, what will stay."""
        return self._look()[0]

    @property
    def state_bytes(self) -> int:
        """Of all state that moves, now and to come."""
        return self._look()[1]

    @property
    def end_bytes(self) -> int:
        """Definition 2: above all else that is alive at ``optimizer.step()``."""
        return self.state_bytes + (self._look()[2] or 0) + SCALARS_BYTES

    @property
    def note(self) -> str:
        """For people: what is counted of it."""
        _, moving, taken = self._look()
        taken_text = "not known" if taken is None else format_bytes(taken)
        if not moving:
            return (
                f"nothing: the optimizer keeps no tensor of {format_bytes(LEAST_BYTES)} or more that nobody else uses; "
                f"optimizer.step() takes {taken_text}"
            )
        return (
            f"{format_bytes(moving)} to the {self._parking.way.name} before the forward and back for optimizer.step(), "
            f"which takes {taken_text} besides"
        )

    def _look(self) -> tuple[int, int, int | None]:
        parking = self._parking
        key = (_outline(self._optimizer), parking.moving_bytes)
        if self._known[0] != key:
            to_come = future_state_sizes(self._optimizer)
            staying = sum(size for size in to_come if not moves(size))
            moving = parking.moving_bytes + sum(filter(moves, to_come))
            self._known = (key, staying, moving, step_bytes(self._optimizer))
        return self._known[1:]


def _outline(optimizer: torch.optim.Optimizer) -> list[object]:
    """What its state and its step depend on, as far as it changes between two steps; numbers such as rates do not."""
    outline: list[object] = [len(each.state) for each in optimizers_in(optimizer)]
    for group in optimizer.param_groups:
        outline += [(id(each), each.requires_grad) for each in group["params"]]
        settings = [(name, bool(value)) for name, value in group.items() if isinstance(value, bool | float | None)]
        outline += settings
    return outline
