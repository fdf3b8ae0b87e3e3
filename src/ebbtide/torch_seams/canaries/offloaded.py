"""The canaries of ``offloaded`` and ``readers``: a tensor's memory goes and comes back under every reference to it."""

from __future__ import annotations

import threading

import torch

from ebbtide.torch_seams import offloaded, readers
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def tensors_can_be_away() -> None:
    """A storage is emptied in place, torch asks before it reads the tensor, and what is filled is what it was."""
    tensor = torch.arange(4.0)
    same, before = tensor, tensor.clone()
    expect(offloaded.can_offload(tensor), "a tensor that nobody shares cannot leave")
    offloaded.mark(tensor, lambda each: offloaded.fill(each, lambda memory: memory.copy_(before)))()
    expect(offloaded.is_offloaded(same), "a tensor does not leave")
    expect(same.shape == (4,) and offloaded.is_offloaded(same), "asking for a shape reads a tensor")
    expect(
        torch.equal(torch.add(same, 0), before) and not offloaded.is_offloaded(tensor), "a tensor does not come back"
    )
    expect(type(tensor) is torch.Tensor and not vars(tensor), "a tensor is not what it was")


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
    expect(not readers.is_read_elsewhere([container[0]], 0, lambda: True), "a container alone reads its tensor")
    end = threading.Event()

    def read(tensor: torch.Tensor) -> None:
        while not end.is_set():
            tensor.add(1)

    reader = threading.Thread(target=read, args=(container[0],), daemon=True)
    reader.start()
    try:
        seen = any(readers.is_read_elsewhere([container[0]], 0, lambda: True) for _ in range(100))
    finally:
        end.set()
        reader.join()
    expect(seen, "a tensor that another thread reads is read by nobody")
