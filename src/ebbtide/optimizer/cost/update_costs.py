"""What an update takes while it runs and what it reads and writes: that of the optimizer's step on one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ebbtide.errors import UsageError
from ebbtide.measurement.resident import storages_in
from ebbtide.optimizer.cost.step_bytes import step_bytes
from ebbtide.optimizer.state.future_bytes import future_state_sizes
from ebbtide.optimizer.state.options import settings_of
from ebbtide.torch_seams.optimizers import parameters_stepped_by

__all__ = ["UpdateCosts"]

_PART_ELEMENTS = 65536  # kChunkSize of aten/src/ATen/native/cuda/MultiTensorApply.cuh
_NUMBER_BYTES = 4
_LEAST_ON_CARD_BYTES = 512  # kMinBlockSize of c10/core/AllocatorConfig.h
_SCALARS = 4  # at most at a time: the total, what it is made into


class UpdateCosts:
    """What updates by one optimizer cost, each kind of parameter found out once.

    Args:
        optimizer: of real, fake or meta parameters.
        device: type of the one that it is to step on; that of the parameters if ``None``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: str | None = None) -> None:
        self._optimizer = optimizer
        self._device = device
        self._bytes_of: dict[object, int] = {}
        self._state = sum(future_state_sizes(optimizer)) + sum(storages_in([list(optimizer.state.values())]).values())
        self._trained = sum(each.nbytes for each in parameters_stepped_by(optimizer))

    def of(self, group: int, parameter: torch.Tensor) -> tuple[int, int]:
        """Bytes that an update of ``parameter``, of the group at ``group``, takes, and that it reads and writes.

        Raises:
            UsageError: if that cannot be found out.
        """
        options = self._optimizer.param_groups[group]
        key = (
            group,
            settings_of(options),
            tuple(parameter.shape),
            parameter.stride(),
            parameter.dtype,
            parameter.device,
        )
        if key not in self._bytes_of:
            self._bytes_of[key] = self._step_bytes(options, parameter)
        state = self._state * parameter.nbytes // max(self._trained, 1)
        return self._bytes_of[key], 3 * parameter.nbytes + 2 * state

    def of_partial_norm(self, parameter: torch.Tensor) -> tuple[int, int]:
        """Bytes that the norm of a gradient like ``parameter`` takes, and that it reads.

        On a card a kernel for lists adds up parts of :data:`_PART_ELEMENTS` elements.
        """
        parts = -(-parameter.numel() // _PART_ELEMENTS)
        return parts * _NUMBER_BYTES if self._on_card(parameter) else 0, parameter.nbytes

    def of_total_norm(self, parameters: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Bytes that the norm of all their norms takes, with what it is made into, and that it reads."""
        least = _LEAST_ON_CARD_BYTES if any(map(self._on_card, parameters)) else _NUMBER_BYTES
        return len(parameters) * _NUMBER_BYTES + _SCALARS * least, len(parameters) * _NUMBER_BYTES

    def _on_card(self, parameter: torch.Tensor) -> bool:
        return (self._device or parameter.device.type) == "cuda"

    def _step_bytes(self, options: dict[str, Any], parameter: torch.Tensor) -> int:
        taken = step_bytes(self._optimizer, self._device, [{**options, "params": [parameter]}])
        if taken is None:
            kind = type(self._optimizer).__name__
            raise UsageError(
                f'step="inside" is not accepted: what a step of {kind} takes while it runs cannot be found out; leave '
                'step="inside" out: fit(model, budget, optimizer=optimizer) has its state in the budget',
                argument="step",
                value="inside",
            )
        return taken
