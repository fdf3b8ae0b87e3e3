"""What surrounds a training call: what its plan depends on besides its step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ebbtide.engine.flights import Flight
from ebbtide.engine.key import Slot
from ebbtide.torch_seams.storages import StorageWatch

__all__ = ["Circumstances"]


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Seen before the call, as ``FittedModel.look_around`` does.

    Attributes:
        slot: key of the call, and how many of the model's forwards are in the air (``between``).
        modes: what of the key does not depend on the arguments.
        trained: per parameter whether it takes a gradient.
        accumulating: whether every parameter that takes a gradient has one.
        module: whose call it is.
        inputs: watches its arguments; empty on CUDA, where the allocator knows.
        device: ``"cpu"`` or ``"cuda"``.
        resident_bytes: before the forward, what flights keep among them.
        reached: keys of the storages that were counted as the model's, one by one.
        aloft: forwards in flight (``flights.aloft``).
        flying_bytes: what they keep.
        hooked: whether saved-tensor hooks are active, as in a checkpoint.
        repeated: whether a backward is running, so that this is a checkpoint's repetition of a forward.
        hooks: on parameters.
        updates: whether its backward applies gradients (``inside``).
    """

    slot: Slot
    modes: object
    trained: bytes
    accumulating: bool
    module: torch.nn.Module
    inputs: tuple[StorageWatch, ...]
    device: str
    resident_bytes: int
    reached: frozenset[int]
    aloft: tuple[Flight, ...]
    flying_bytes: int
    hooked: bool
    repeated: bool
    hooks: tuple[int, ...]
    updates: bool = False

    @property
    def key(self) -> object:
        """Of the call."""
        return self.slot.key

    @property
    def checkpointed(self) -> bool:
        """Whether somebody else's checkpoint or offload may be around this call."""
        return self.hooked or self.repeated
