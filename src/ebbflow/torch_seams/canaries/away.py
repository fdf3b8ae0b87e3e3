"""The canaries of ``away``: that a tensor's memory can go and come back under every reference to it."""

from __future__ import annotations

import torch

from ebbflow.torch_seams import away
from ebbflow.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def tensors_can_be_away() -> None:
    """A storage is emptied in place, torch asks before it reads the tensor, and what is filled is what it was."""
    tensor = torch.arange(4.0)
    same, before = tensor, tensor.clone()
    expect(away.can_leave(tensor), "a tensor that nobody shares cannot leave")
    away.empty(tensor, lambda: away.fill(tensor, lambda memory: memory.copy_(before)))
    expect(away.is_away(same) and same.shape == (4,) and away.is_away(same), "asking for a shape reads a tensor")
    expect(torch.equal(torch.add(same, 0), before) and not away.is_away(tensor), "a tensor does not come back")
    expect(type(tensor) is torch.Tensor and not vars(tensor), "a tensor is not what it was")


@canary
def shared_memory_is_seen() -> None:
    """A view, a storage in Python and a capsule for other libraries are uses; what NumPy has seen is fixed."""
    tensor = torch.arange(4.0)
    for share in (lambda: tensor[1:], lambda: tensor.detach(), tensor.untyped_storage, tensor.__dlpack__):
        other = share()
        expect(not away.can_leave(tensor), f"{share} is not seen")
        del other
        expect(away.can_leave(tensor), f"{share} is seen when it is gone")
    tensor.numpy()
    expect(not away.can_leave(tensor), "memory that NumPy has can be given back")
