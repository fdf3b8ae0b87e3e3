"""State that was offloaded together: its copies in one region of a tier, and the way back.

1. The copies come first, all of them; only then is memory given back, tensor by tensor. Whoever sends a batch has it
   by then, to bring it back whenever something interrupts that.
2. The region is free once everything is back, or nobody can bring anything back any more.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterable, Iterator

import torch

from ebbtide.errors import TierError
from ebbtide.signals import signals_wait
from ebbtide.torch_seams.offloaded import Emptied, fill, refuse_reads, restore
from ebbtide.torch_seams.readers import is_read_elsewhere
from ebbtide.transfers.paths import Copy, TransferPath
from ebbtide.transfers.slots import Slot, Space, region_bytes
from ebbtide.transfers.traffic import Traffic

__all__ = ["Batch"]


class Batch:
    """What was offloaded together, in one region. Whoever has it sees to it that one thread at a time uses it.

    Args:
        tensors: that can be offloaded; they are copied.
        path: to the tier.
        traffic: to which what moves is added.

    Raises:
        TierError: if the tier has no room, or a copy failed. All tensors are as they were.
    """

    def __init__(self, tensors: list[torch.Tensor], path: TransferPath, traffic: Traffic) -> None:
        self._path, self._traffic = path, traffic
        self._process = os.getpid()
        slots = list(_slots(tensors, path.name))
        self._region = region = path.region(region_bytes(slots)[path.name])
        self._end = weakref.finalize(self, _give_back, path, region, self._process)
        self._end.atexit = False
        self._members: list[tuple[Emptied, Slot, Copy]] = []
        self._copied = list(zip(slots, self._copies(tensors, slots), strict=True))

    def empty(self, tensors: list[torch.Tensor], refusal: str) -> None:
        """Give back the memory of ``tensors``, those that were copied, but where another thread is reading it.

        Args:
            tensors: that this list and their container hold alone, as far as nobody else does.
            refusal: what whoever reads one of them from now on is told (``torch_seams.offloaded``).
        """
        with signals_wait(why=""):  # a handler would find state that is neither here nor there
            for index, (slot, copy) in enumerate(self._copied):
                emptied = refuse_reads(tensors[index], refusal)
                if is_read_elsewhere(tensors, index):
                    restore(tensors[index])
                    continue
                emptied.storage.resize_(0)
                self._members.append((emptied, slot, copy))
                self._traffic.out_bytes += slot.bytes

    def _copies(self, tensors: list[torch.Tensor], slots: list[Slot]) -> list[Copy]:
        copies: list[Copy] = []
        try:
            for slot, tensor in zip(slots, tensors, strict=True):
                copies.append(self._path.send(self._region, slot, tensor, _nothing, timed=self._traffic.timed))
            for copy in copies:
                copy.join(self._traffic)
        except BaseException:
            for copy in copies:
                copy.cancel()
                copy.join(self._traffic)
            raise
        for slot, copy in zip(slots, copies, strict=True):
            if copy.failure:
                raise self._region.failure(f"moving {slot.name} to the {slot.tier} tier", copy.failure)
        return copies

    def offloaded_bytes(self) -> int:
        """Bytes of its tensors that live and have no memory; the others are forgotten."""
        self._members = [each for each in self._members if each[0].is_offloaded]
        return sum(slot.bytes for _, slot, _ in self._members)

    def holds_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether any of ``tensors`` is offloaded with it."""
        own = {id(emptied.tensor()) for emptied, _, _ in self._members}
        return any(id(each) in own for each in tensors)

    def bring_back(self) -> None:
        """Bring back what is alive. A signal handler may do so while this is running.

        Raises:
            TierError: if a copy failed, or in a process that was forked meanwhile.
        """
        if self._members and os.getpid() != self._process:
            raise TierError(
                "this process was forked while the optimizer's state was on the "
                f"{self._path.name} tier, where it belongs to the process that it was forked from; start processes "
                "before the forward or after optimizer.step(), or take optimizer.state_dict() first",
                tier=self._path.name,
            )
        while self._members:
            emptied, slot, copy = each = self._members[-1]
            if emptied.is_offloaded:
                fill(emptied, functools.partial(self._fetch, slot, copy))
                self._traffic.in_bytes += slot.bytes
            if self._members and self._members[-1] is each:
                self._members.pop()
        self._end()

    def _fetch(self, slot: Slot, sent: Copy, tensor: torch.Tensor) -> None:
        copy = self._path.fetch(self._region, slot, tensor, sent, _nothing, timed=self._traffic.timed)
        copy.join(self._traffic)
        if copy.failure:
            raise TierError(
                f"bringing {slot.name} back from the {slot.tier} tier failed: {copy.failure}. It is still "
                "there and is fetched again by the next optimizer.step() or state_dict(); see to the disk, or go on "
                "from a checkpoint",
                tier=slot.tier,
            )


def _nothing() -> None:
    """After a copy there is nothing to do: whoever issued it waits for it."""


def _give_back(path: TransferPath, region: object, process: int) -> None:
    if os.getpid() == process:
        path.give_back(region)


def _slots(tensors: list[torch.Tensor], tier: str) -> Iterator[Slot]:
    space = Space({})
    for index, each in enumerate(tensors):
        size = each.untyped_storage().nbytes()
        yield Slot(
            buffer=index,
            name=f"the optimizer's state {index} ({'x'.join(map(str, each.shape))})",
            tier=tier,
            offset=space.take(tier, size),
            bytes=size,
            shape=tuple(each.shape),
            stride=each.stride(),
            dtype=each.dtype,
            device=each.device,
        )
