"""What has to be kept free inside a budget for what no program shows."""

from __future__ import annotations

import torch

from ebbflow.measure.optimizer_state import future_state_bytes
from ebbflow.measure.resident import resident_bytes
from ebbflow.runtime.fingerprint import SCRATCH_BYTES_CUDA

__all__ = ["reserve_bytes"]

_GENERATOR_STATE_BYTES = 2 * 5056  # remembered over the proven step, and the copy made to put it back


def reserve_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: str, *, verify: bool) -> int:
    """Bytes to keep free: optimizer state to come, and what the proven first step remembers.

    Raises:
        UsageError: if the optimizer's state cannot be foreseen.
    """
    count = future_state_bytes(optimizer) if optimizer is not None else 0
    if verify:
        count += resident_bytes([*model.buffers()]) + _GENERATOR_STATE_BYTES
        count += SCRATCH_BYTES_CUDA if device == "cuda" else 0
    return count
