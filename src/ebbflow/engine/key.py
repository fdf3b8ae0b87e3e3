"""What the step of a call depends on besides the model: its arguments, modes, autocast, threads, what is frozen."""

from __future__ import annotations

from typing import Any

import torch

from ebbflow.torch_seams.storages import module_table, parameter_table
from ebbflow.torch_seams.trees import tree_flatten

__all__ = ["key_of", "modes_of"]


def key_of(module: torch.nn.Module, device: str, args: Any, kwargs: Any) -> object:
    """The key of one training call. Two calls of one key may still be different steps: torch's guards know."""
    leaves, spec = tree_flatten((args, kwargs))
    parts: list[object] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
        else:
            parts.append((type(leaf).__qualname__, repr(leaf)))
    return (tuple(parts), str(spec), modes_of(module, device))


def modes_of(module: torch.nn.Module, device: str) -> object:
    """What a step depends on besides the model and its arguments."""
    autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return (module.training, *autocast, torch.get_num_threads(), _frozen(module))


def _frozen(module: torch.nn.Module) -> bytes:
    """Per parameter whether it takes a gradient. Every call asks: torch's own walk over parameters takes thrice."""
    seen = {id(module)}
    waiting = [module]
    found: list[bool] = []
    while waiting:
        each = waiting.pop()
        for parameter in parameter_table(each).values():
            if parameter is not None:
                found.append(parameter.requires_grad)
        for child in module_table(each).values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return bytes(found)
