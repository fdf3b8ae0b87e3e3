"""What a failed proof puts back: buffers and random state as they were before the forward."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["snapshot"]


def snapshot(module: torch.nn.Module, device: str) -> Callable[[], None]:
    """What puts buffers and random state back to where they are now."""
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    cpu_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if device == "cuda" else None

    def restore() -> None:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)

    return restore
