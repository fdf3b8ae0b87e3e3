"""The canaries of ``offloaded`` and ``readers``: a tensor's memory goes and comes back under every reference to it."""

from __future__ import annotations

import threading

import torch

from ebbtide.errors import UsageError
from ebbtide.torch_seams import offloaded, readers
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def tensors_can_be_offloaded() -> None:
    """A storage is emptied in place, torch asks before it reads the tensor, and what is filled is what it was."""
    tensor = torch.arange(4.0)
    same, before = tensor, tensor.clone()
    expect(offloaded.can_offload(tensor), "a tensor that nobody shares cannot leave")
    emptied = offloaded.refuse_reads(tensor, "state")
    emptied.storage.resize_(0)
    expect(same.shape == (4,) and offloaded.is_offloaded(same), "asking for a shape reads a tensor")
    for read in (lambda: torch.add(same, 0), same.untyped_storage, same.tolist):
        try:
            read()
        except UsageError as error:
            refused = str(error)
        else:
            refused = ""
        expect(refused.endswith(" is given state"), f"{read} reads a tensor without memory")
    offloaded.fill(emptied, lambda memory: memory.copy_(before))
    del emptied
    expect(torch.equal(same, before), "a tensor does not come back")
    expect(type(tensor) is torch.Tensor and not vars(tensor), "a tensor is not what it was")
    expect(offloaded.can_offload(tensor), "a tensor can leave but once")


@canary
def shared_memory_is_seen() -> None:
    """A view, a storage in Python and a capsule for other libraries are uses; what NumPy has seen is fixed."""
    tensor = torch.arange(4.0)
    for share in (lambda: tensor[1:], lambda: tensor.detach(), tensor.untyped_storage, tensor.__dlpack__):
        other = share()
        expect(not offloaded.can_offload(tensor), f"{share} is not seen")
        del other
        expect(offloaded.can_offload(tensor), f"{share} is seen when it is gone")
    tensor.numpy()
    expect(not offloaded.can_offload(tensor), "memory that NumPy has can be given back")


@canary
def readers_on_other_threads_are_seen() -> None:
    """Whoever runs an op on a tensor has a reference to it, which counts while another thread runs."""
    container = {0: torch.empty(1)}
    expect(not readers.is_read_elsewhere([container[0]], 0), "a container alone reads its tensor")
    end = threading.Event()

    def read(tensor: torch.Tensor) -> None:
        while not end.is_set():
            tensor.add(1)

    reader = threading.Thread(target=read, args=(container[0],), daemon=True)
    reader.start()
    try:
        seen = any(readers.is_read_elsewhere([container[0]], 0) for _ in range(100))
    finally:
        end.set()
        reader.join()
    expect(seen, "a tensor that another thread reads is read by nobody")
