"""The wrapper of torch that trains one model in several processes, as seen from the model inside of it.

``DistributedDataParallel`` keeps gradients in *buckets*, flat tensors that its reducer makes when the model is wrapped
and exchanges while the backward runs. They are known to no Python object. While the wrapper's forward runs, torch
remembers it: that is how a model learns that it is inside of one.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ebbtide.torch_seams.storages import storage_key

__all__ = ["bucket_bytes", "is_alone"]

_WRAPPERS: MutableMapping[torch.nn.Module, weakref.ref[DistributedDataParallel]] = WeakIdKeyDictionary()


def bucket_bytes(module: torch.nn.Module) -> int:
    """Bytes of the buckets around ``module`` that its gradients do not lie in; 0 if it is in no such wrapper.

    With ``gradient_as_bucket_view=True`` gradients are views of the buckets from the first backward that reduces them
    on, and what a walk over the model counts. One that ``no_sync`` has left where there was none has memory of its own.
    """
    wrapper = _wrapper_of(module)
    if wrapper is None:
        return 0
    trained = [each for each in wrapper.module.parameters() if each.requires_grad]
    total = sum(each.numel() * each.element_size() for each in trained)
    if not wrapper.gradient_as_bucket_view:
        return total
    views = [each.grad for each in trained if each.grad is not None and each.grad._is_view()]
    seen = {storage_key(each): each.untyped_storage().nbytes() for each in views}
    return max(total - sum(seen.values()), 0)


def is_alone() -> bool:
    """Whether this process is the only one of its world."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() == 1


def _wrapper_of(module: torch.nn.Module) -> DistributedDataParallel | None:
    """The wrapper whose forward runs, if ``module`` is inside of it, or else the one that it was called by before."""
    running = DistributedDataParallel._get_active_ddp_module()
    if isinstance(running, DistributedDataParallel) and running.module is module:
        _WRAPPERS[module] = weakref.ref(running)
        return running
    known = _WRAPPERS.get(module)
    return None if known is None else known()
