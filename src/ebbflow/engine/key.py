"""What the step of a call depends on besides the model: its arguments, modes, autocast, threads, what is frozen."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ebbflow.torch_seams.trees import tree_flatten

__all__ = ["Slot", "key_of", "modes_of"]


class Slot(NamedTuple):
    """Which call of a round it is.

    Attributes:
        key: of the call.
        depth: how many of the model's forwards were in the air when it started.
    """

    key: object
    depth: int


def key_of(modes: object, args: Any, kwargs: Any) -> object:
    """The key of one training call. Two calls of one key may still be different steps: torch's guards know."""
    leaves, spec = tree_flatten((args, kwargs))
    parts: list[object] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
        else:
            parts.append((type(leaf).__qualname__, repr(leaf)))
    return (tuple(parts), str(spec), modes)


def modes_of(module: torch.nn.Module, device: str, trained: bytes) -> object:
    """What a step depends on besides the model and its arguments; ``trained`` says which parameters take gradients."""
    autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return (module.training, *autocast, torch.get_num_threads(), trained)
