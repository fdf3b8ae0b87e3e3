"""Parameters of which a process holds a shard: DTensors, and modules that ``fully_shard`` gathers them for.

A DTensor wraps a local tensor and says the sizes of the whole: its own storage has a length and no memory. Between the
hooks of ``fully_shard`` a module's parameters are plain tensors, so that its state says that it is sharded: torch
keeps that beside the modules (``torch.distributed._composable_state``). Nothing is imported here: where torch's modules
for it are not loaded, nothing is sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ebbtide.torch_seams.storages import modules_in
from ebbtide.user_objects import is_a

__all__ = ["dtensors_in", "fully_sharded", "sharding_states"]

_DTENSOR, _STATES = "torch.distributed.tensor", "torch.distributed._composable_state"
_SHARDING = "FSDPState"


def dtensors_in(named: Iterable[tuple[str, object]]) -> list[str]:
    """The names of those that are DTensors."""
    loaded = sys.modules.get(_DTENSOR)
    if loaded is None:
        return []
    kind: type[torch.Tensor] = loaded.DTensor
    return [name for name, value in named if is_a(value, kind)]


def sharding_states() -> tuple[int, ...]:
    """What tells whether a module has been sharded since this was asked last; empty while none is."""
    states = _states()
    return tuple(map(id, states)) if states else ()


def fully_sharded(module: torch.nn.Module) -> str:
    """The class of a module that is sharded as a whole and has ``module`` in it, or is in it; empty if none is."""
    for root in list(_states()):
        if _is_sharded(root) and (_holds(root, module) or _holds(module, root)):
            return type(root).__name__
    return ""


def _states() -> Mapping[torch.nn.Module, Any]:
    loaded = sys.modules.get(_STATES)
    return {} if loaded is None else loaded._module_state_mapping


def _is_sharded(module: torch.nn.Module) -> bool:
    """Whether its state is one of ``fully_shard``: other wrappers, which shard nothing, keep theirs there as well."""
    reference = _states().get(module)
    state = None if reference is None else reference()
    return any(each.__name__ == _SHARDING for each in type(state).__mro__)


def _holds(outer: torch.nn.Module, inner: torch.nn.Module) -> bool:
    return any(each is inner for each in modules_in(outer))
