"""Where the copies of one step lie in their tiers: constants of a plan, known before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ebbtide.step.machine import Link

__all__ = ["Slot", "Space", "region_bytes"]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one buffer's copy, and what comes back from it.

    Attributes:
        buffer: of the program.
        name: of the buffer, for people.
        tier: where the copy is.
        offset: of its first byte in the step's region of the tier.
        bytes: of the copy: the whole storage.
        shape: of the tensor that fills the storage.
        stride: of that tensor, in elements.
        dtype: of that tensor.
        device: where it comes from and goes back to.
    """

    buffer: int
    name: str
    tier: str
    offset: int
    bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> torch.Tensor:
        """A new tensor like the one that leaves, allocated where and on what this thread computes."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Space:
    """Gives out places in the tiers of one step, one after the other.

    Args:
        links: by tier, for their alignment.
    """

    def __init__(self, links: Mapping[str, Link]) -> None:
        self._links = links
        self._used: dict[str, int] = {}

    def take(self, tier: str, size: int) -> int:
        """The offset of a new place of ``size`` bytes."""
        offset = self._used.get(tier, 0)
        self._used[tier] = offset + (self._links[tier].round_up(size) if tier in self._links else size)
        return offset


def region_bytes(slots: Iterable[Slot]) -> dict[str, int]:
    """Per tier, what the copies of one step take of it."""
    found: dict[str, int] = {}
    for slot in slots:
        found[slot.tier] = max(found.get(slot.tier, 0), slot.offset + slot.bytes)
    return found
