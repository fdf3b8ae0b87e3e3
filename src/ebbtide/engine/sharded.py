"""Models whose parameters are shards, refused by name before anything of them runs.

What is read of such a parameter, its sizes and its memory, is not what a process holds of it: it would be counted
wrongly, and an op that is timed in its memory ends the process. It may become one before ``fit`` or after, of the model
itself, of modules in it or of one around it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, MutableMapping
from typing import cast

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ebbtide.errors import UsageError
from ebbtide.torch_seams.sharding import dtensors_in, fully_sharded, sharding_states
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["refuse_newly_sharded", "refuse_sharded"]

_TRAIN = (
    "no plan covers yet what a step then takes in each process; train it unsharded, in DistributedDataParallel, with "
    "the module inside fitted, or without fit"
)
_seen: MutableMapping[torch.nn.Module, tuple[int, ...]] = WeakIdKeyDictionary()


def refuse_sharded(model: torch.nn.Module, arguments: object = ()) -> None:
    """Refuse a model of which ``fully_shard`` or ``parallelize_module`` has made DTensors, or a call with some.

    Raises:
        UsageError: naming the module or the tensor.
    """
    if by := fully_sharded(model):
        raise UsageError(
            f"fully_shard gathers the weights of this {type(model).__name__} from other processes, in hooks of "
            f"{by}: {_TRAIN}",
            argument="model",
        )
    named = itertools.chain(
        cast("Iterator[tuple[str, object]]", model.named_parameters()),
        cast("Iterator[tuple[str, object]]", model.named_buffers()),
    )
    if found := dtensors_in(named):
        raise UsageError(
            f"{found[0]} of this {type(model).__name__} is a DTensor, of which this process may hold a part "
            f"(fully_shard, parallelize_module, distribute_tensor): {_TRAIN}",
            argument="model",
        )
    if dtensors_in(("", each) for each in tree_leaves(arguments)):
        raise UsageError(
            f"an argument of the call is a DTensor, of which this process may hold a part: {_TRAIN}", argument="model"
        )


def refuse_newly_sharded(model: torch.nn.Module) -> None:
    """Refuse a fitted model that ``fully_shard`` was called on, around or inside of since its last call.

    Raises:
        UsageError: naming the module.
    """
    states = sharding_states()
    if states and _seen.get(model) != states:
        refuse_sharded(model)
        _seen[model] = states
