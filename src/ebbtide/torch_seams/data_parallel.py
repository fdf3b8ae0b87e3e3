"""The wrapper of torch that trains one model in several processes, as seen from the model inside of it.

``DistributedDataParallel`` keeps gradients in *buckets*, flat tensors that its reducer makes when the model is wrapped
and exchanges while the backward runs. They are known to no Python object. While the wrapper's forward runs, torch
remembers it: that is how a model learns that it is inside of one.

A rank that does not come to an exchange leaves the others in it. It may *stand in* for its own part: for that of the
backward with zeros, as torch's own ``Join`` does for ranks that have run out of data.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ebbtide.torch_seams.storages import storage_key

__all__ = [
    "bucket_bytes",
    "exchanges_before_forward",
    "exchanges_gradients",
    "exchanges_so_far",
    "group_of",
    "running_wrapper",
    "stand_in_for_backward",
    "stand_in_for_forward",
    "world_size",
]

_WRAPPERS: MutableMapping[torch.nn.Module, weakref.ref[DistributedDataParallel]] = WeakIdKeyDictionary()
_PARTS: MutableMapping[torch.nn.Module, tuple[weakref.ref[DistributedDataParallel], bool]] = WeakIdKeyDictionary()


def bucket_bytes(module: torch.nn.Module) -> int:
    """Bytes of the buckets around ``module`` that its gradients do not lie in; 0 if it is in no such wrapper.

    With ``gradient_as_bucket_view=True`` gradients are views of the buckets from the first backward that reduces them
    on, and what a walk over the model counts. One that ``no_sync`` has left where there was none has memory of its own.
    """
    wrapper = _wrapper_of(module)
    if wrapper is None:
        return 0
    trained = [each for each in module.parameters() if each.requires_grad]
    total = sum(each.numel() * each.element_size() for each in trained)
    if not wrapper.gradient_as_bucket_view:
        return total
    views = [each.grad for each in trained if each.grad is not None and each.grad._is_view()]
    seen = {storage_key(each): each.untyped_storage().nbytes() for each in views}
    return max(total - sum(seen.values()), 0)


def world_size() -> int:
    """How many processes train together; 0 where no group of processes was made."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


def running_wrapper(module: torch.nn.Module) -> DistributedDataParallel | None:
    """The wrapper whose forward runs right now and calls ``module``, which is its module or a part of that."""
    running = DistributedDataParallel._get_active_ddp_module()
    return running if isinstance(running, DistributedDataParallel) and _is_in(module, running) else None


def _is_in(module: torch.nn.Module, wrapper: DistributedDataParallel) -> bool:
    """Whether ``module`` is a part of what is wrapped, or that; remembered, as every call asks."""
    if wrapper.module is module:
        return True
    known = _PARTS.get(module)
    if known is None or known[0]() is not wrapper:
        is_part = any(each is module for each in wrapper.module.modules())
        known = _PARTS[module] = (weakref.ref(wrapper), is_part)
    return known[1]


def group_of(wrapper: DistributedDataParallel) -> tuple[dist.ProcessGroup, torch.device]:
    """The processes that it exchanges with, and where what it sends them lies."""
    group: Any = wrapper.process_group
    return group, wrapper.device


def exchanges_gradients(wrapper: DistributedDataParallel) -> bool:
    """Whether the backward of a forward that runs now exchanges gradients, and is not in ``no_sync``."""
    return torch.is_grad_enabled() and wrapper.require_backward_grad_sync


def exchanges_before_forward(wrapper: DistributedDataParallel, *, exchanged: int) -> bool:
    """Whether a forward that begins now exchanges something first: buffers, or once the order of buckets.

    Args:
        wrapper: it.
        exchanged: how many backwards of it have exchanged gradients. The order is theirs of the first, and with
            ``static_graph`` of the second: the first only finds out which parameters are used.
    """
    if wrapper._check_sync_bufs_pre_fwd():
        return True
    has_order = wrapper.static_graph or not wrapper.find_unused_parameters
    has_order = has_order and exchanged > int(wrapper.static_graph)
    return has_order and torch.is_grad_enabled() and not wrapper._has_rebuilt_buckets


def stand_in_for_forward(wrapper: DistributedDataParallel, *, gradients: bool) -> None:
    """Take part in what ``wrapper`` exchanges before its module's forward.

    Args:
        wrapper: it.
        gradients: whether the others' forward is one with gradients: others exchange buffers alone.
    """
    with torch.set_grad_enabled(gradients):
        wrapper._pre_forward()


def exchanges_so_far(wrapper: DistributedDataParallel) -> int:
    """How many backwards of ``wrapper`` have exchanged gradients, as far as it matters while its forward runs.

    Once the order of buckets is exchanged it does not. Before, there was none yet, but for the first of static_graph.
    """
    return int(wrapper.static_graph and wrapper._static_graph_delay_allreduce_enqueued)


def stand_in_for_backward(wrapper: DistributedDataParallel, *, first: bool) -> None:
    """Take part in what ``wrapper`` exchanges in a backward, with zeros, in the order in which its reducer does.

    Which parameters were used comes after the buckets; with ``static_graph`` it comes before them, in the first
    backward alone. The next forward makes the buckets anew, in the order of rank 0 and together with the others.

    Args:
        wrapper: it.
        first: whether no backward of it has exchanged gradients.
    """
    with torch.no_grad():
        if wrapper.static_graph and first:
            _exchange_used(wrapper)
        wrapper._match_all_reduce_for_bwd_pass()
        if wrapper.find_unused_parameters and not wrapper.static_graph:
            _exchange_used(wrapper)
        if not (wrapper.static_graph and first):
            wrapper.reducer._push_all_rebuilt_params()


def _exchange_used(wrapper: DistributedDataParallel) -> None:
    group, _ = group_of(wrapper)
    group.allreduce([wrapper.reducer._get_local_used_map()]).wait()


def _wrapper_of(module: torch.nn.Module) -> DistributedDataParallel | None:
    """The wrapper whose forward runs, if ``module`` is inside of it, or else the one that it was called by before."""
    running = running_wrapper(module)
    if running is not None:
        _WRAPPERS[module] = weakref.ref(running)
        return running
    known = _WRAPPERS.get(module)
    return None if known is None else known()
