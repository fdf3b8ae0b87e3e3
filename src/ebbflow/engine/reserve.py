"""What has to be kept free inside a budget for what no program shows."""

from __future__ import annotations

import torch

from ebbflow.engine.snapshot import snapshot_bytes
from ebbflow.lower.fingerprints import SCRATCH_BYTES_CUDA

__all__ = ["reserve_bytes"]

_GENERATOR_STATE_BYTES = 2 * 5056  # remembered over the proven step, and the copy made to put it back


def reserve_bytes(model: torch.nn.Module, device: str, *, verify: bool) -> int:
    """Bytes to keep free for what the proven first step remembers; none if no step is proven."""
    if not verify:
        return 0
    scratch = SCRATCH_BYTES_CUDA if device == "cuda" else 0
    return snapshot_bytes(model) + _GENERATOR_STATE_BYTES + scratch
