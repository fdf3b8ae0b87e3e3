"""Random replay: a repeat of a random op draws what its first run drew, and leaves the generator as it was.

On CPU the state is the generator's own tensor (5,056 bytes); on CUDA it holds seed and offset (16 bytes, on the
host, no synchronisation). Both functions are targets of nodes in the lowered graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["read_state", "replay"]


def _generator(device: str) -> torch.Generator:
    if device == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator


def read_state(device: str) -> torch.Tensor:
    """The state of the device's default generator, right before the first run of an op that will be replayed."""
    return _generator(device).get_state()


def replay(device: str, state: torch.Tensor, target: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run ``target`` under the recorded ``state``, then put the generator back."""
    generator = _generator(device)
    current = generator.get_state()
    generator.set_state(state)
    try:
        return target(*args, **kwargs)
    finally:
        generator.set_state(current)
