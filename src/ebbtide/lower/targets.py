"""What the lowered graphs call besides the captured ops: random replay and moves. Each is the target of nodes.

Replay: a repeat of a random op draws what its first run drew, and leaves the generator as it was. On CPU the state is
the generator's own tensor (5,056 bytes); on CUDA it holds seed and offset (16 bytes, on the host, no synchronisation).

Moves: a number names a slot of the plan; what is there is known to the arena of the step that runs
(``transfers.arena``, which says what each of the four does).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ebbtide.transfers.arena import current_arena

__all__ = ["EFFECTS", "arrive", "offload", "read_state", "reload", "replay", "settle"]


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


def offload(slot: int, tensor: torch.Tensor) -> None:
    """Issue the copy of ``tensor`` to its slot."""
    current_arena().offload(slot, tensor)


def settle(slot: int, tensor: torch.Tensor) -> None:
    """Wait until ``tensor`` has been copied; its last use is here."""
    current_arena().settle(slot, tensor)


def reload(slot: int) -> torch.Tensor:
    """A tensor like the one that left, its bytes on their way."""
    return current_arena().reload(slot)


def arrive(slot: int, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` once its bytes are there."""
    return current_arena().arrive(slot, tensor)


EFFECTS = frozenset({read_state, offload, settle})
"""Targets that are called for what they do: nobody needs to read their result."""
