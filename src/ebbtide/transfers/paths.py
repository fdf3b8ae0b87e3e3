"""What an arena asks of a tier, whatever it is made of: places for copies, and copies one way and the other.

1. A *region* is memory of the tier for the copies of one step in flight. Regions that are free are used again.
2. A *copy* is under way once it has been issued. *Joining* it makes sure that what is computed from then on comes after
   it: on CPU by waiting, on CUDA by a wait of the streams that no thread takes part in.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch

from ebbtide.errors import TierError
from ebbtide.transfers.slots import Slot
from ebbtide.transfers.traffic import Traffic

__all__ = ["MOST_FREE", "Block", "Copy", "Pool", "TransferPath"]

MOST_FREE = 4
"""Regions of a tier that are kept for later steps."""

_FITS = 1.25  # times what is asked for: a free region that large will do
_SMALL_BYTES = 4 * 2**20  # any free region up to this size will do


class Copy(Protocol):
    """A copy under way (definition 2)."""

    @property
    def failure(self) -> str:
        """What went wrong, in words; empty if nothing did, or if it cannot be known yet."""
        ...

    def join(self, traffic: Traffic) -> None:
        """What computes from here on comes after it; its seconds are added to ``traffic``."""
        ...

    def cancel(self) -> None:
        """Nobody needs it any more."""
        ...


class Block(Protocol):
    """Memory of a tier (definition 1)."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    @property
    def close(self) -> Callable[[], object]:
        """Gives its memory back to the system."""
        ...

    def failure(self, what: str, why: str) -> TierError:
        """What to raise where a copy failed."""
        ...


class TransferPath(Protocol):
    """A tier that can be used.

    Attributes:
        always_timed: whether copies know their seconds without being asked to take them.
    """

    always_timed: bool

    @property
    def name(self) -> str:
        """``"host"`` or ``"disk"``."""
        ...

    def region(self, size: int) -> Any:
        """A region of at least ``size`` bytes that nobody else uses."""
        ...

    def give_back(self, region: Any) -> None:
        """Nobody uses ``region`` any more. May be called from a finalizer."""
        ...

    def send(self, region: Any, slot: Slot, tensor: torch.Tensor, then: Callable[[], None], *, timed: bool) -> Copy:
        """Issue the copy of ``tensor`` to its slot; ``then`` is called once ``region`` may be given back."""
        ...

    def fetch(
        self, region: Any, slot: Slot, tensor: torch.Tensor, out: Any, then: Callable[[], None], *, timed: bool
    ) -> Copy:
        """Issue the way back of ``out``, a copy of this tier, into ``tensor``, which was allocated just now."""
        ...


R = TypeVar("R", bound=Block)


class Pool(Generic[R]):
    """Regions, used again once they are given back. A process that was forked from has none of its parent's."""

    def __init__(self) -> None:
        self._start_anew()
        _pools.add(self)

    def _start_anew(self) -> None:
        # A finalizer may give a region back while this very thread takes one.
        self._lock = threading.RLock()
        self._free: list[R] = []

    @abstractmethod
    def _make(self, size: int) -> R:
        """A new region."""

    def region(self, size: int) -> R:
        """A region of at least ``size`` bytes that nobody else uses.

        Raises:
            TierError: if the tier has no room for it.
        """
        with self._lock:
            fitting = [each for each in self._free if size <= each.size <= max(_FITS * size, _SMALL_BYTES)]
            if fitting:
                found = min(fitting, key=lambda each: each.size)
                self._free.remove(found)
                return found
        try:
            return self._make(size)
        except TierError:
            if not self.give_up_free():
                raise
            return self._make(size)

    def give_back(self, region: R) -> None:
        """Nobody uses ``region`` any more. May be called from a finalizer."""
        with self._lock:
            self._free.append(region)
            surplus = self._free[:-MOST_FREE]
            del self._free[:-MOST_FREE]
        for each in surplus:
            each.close()

    def give_up_free(self) -> int:
        """Close what is kept for later steps; how many regions that was."""
        with self._lock:
            idle, self._free = self._free, []
        for each in idle:
            each.close()
        return len(idle)


_pools: weakref.WeakSet[Pool[Any]] = weakref.WeakSet()


def _forked() -> None:
    for pool in _pools:
        pool._start_anew()  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_forked)
