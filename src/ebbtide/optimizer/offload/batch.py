"""State that left together: its copies in one region of a tier, and the way back.

1. The copies come first, all of them; only then is memory given back, tensor by tensor.
2. A tensor *asks* before it is read, on any thread, in a signal handler, or in a finalizer of garbage. All of the lot
   comes back then.
3. The region is free once nobody can bring anything back any more.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ebbtide.errors import TierError
from ebbtide.torch_seams.offloaded import fill, forget, is_offloaded, mark
from ebbtide.torch_seams.readers import is_read_elsewhere
from ebbtide.transfers.slots import Slot, Space, region_bytes
from ebbtide.transfers.traffic import Traffic
from ebbtide.transfers.ways import Copy, Way

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True, eq=False)
class _Left:
    """A tensor that is away, not kept alive, with its place and the copy that took it there."""

    tensor: weakref.ref[torch.Tensor]
    slot: Slot
    copy: Copy


class Batch:
    """What left together, in one region.

    Raises:
        TierError: if the tier has no room, or a copy failed.
    """

    def __init__(self, tensors: list[torch.Tensor], way: Way, traffic: Traffic) -> None:
        self._way, self._traffic = way, traffic
        self._process = os.getpid()
        self._lock = threading.RLock()
        slots = list(_slots(tensors, way.name))
        self._region = region = way.region(region_bytes(slots)[way.name])
        # Once nobody can bring anything back any more, the region is free: the tensors hold on to this.
        self._end = weakref.finalize(self, _give_back, way, region, os.getpid())
        self._end.atexit = False
        copies: list[Copy] = []
        try:
            for slot, tensor in zip(slots, tensors, strict=True):
                copies.append(way.send(region, slot, tensor, _nothing, timed=traffic.timed))
            for copy in copies:
                copy.join(traffic)
        except BaseException:
            for copy in copies:
                copy.cancel()
                copy.join(traffic)
            raise
        for slot, copy in zip(slots, copies, strict=True):
            if copy.failure:
                raise region.failure(f"moving {slot.name} to the {slot.tier} tier", copy.failure)
        self._seen_all = True
        self._asking: list[None] = []  # threads that are about to read
        self._copied = list(zip(slots, copies, strict=True))  # until all have left
        self.left: list[_Left] = []

    def leave(self, tensors: list[torch.Tensor]) -> None:
        """Give back the memory of ``tensors``, those that were copied."""
        with self._lock:
            for index, (slot, copy) in enumerate(self._copied):
                each = _Left(weakref.ref(tensors[index]), slot, copy)
                ask = functools.partial(self._asked, each)
                self.left.append(each)
                go = mark(tensors[index], ask)  # from here on whoever begins to read it waits for the lock
                if not is_read_elsewhere(tensors, index, lambda: bool(self._asking)):
                    go()
                    if not is_offloaded(tensors[index]):  # a signal handler has brought it back just before
                        mark(tensors[index], ask)
                        self.left.append(each)
                elif not self._asking:
                    if each in self.left:
                        self.left.remove(each)
                    forget(tensors[index])
                    continue
                self._traffic.out_bytes += slot.bytes
            self._copied.clear()

    def still_away(self) -> bool:
        """Whether anything is. What is not any more, since bringing it back was interrupted, is forgotten."""
        with self._lock:
            for each in self.left.copy():
                tensor = each.tensor()
                if tensor is None or not is_offloaded(tensor):
                    self.left.remove(each)
                if tensor is None:
                    self._seen_all = False
                elif not is_offloaded(tensor):
                    forget(tensor)
            return bool(self.left)

    def holds_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether any of ``tensors`` is away with it."""
        left = {id(each.tensor()) for each in self.left}
        return any(id(each) in left for each in tensors)

    def back(self) -> None:
        """Bring back what is alive. A signal handler may do so while this is running."""
        if self.left and os.getpid() != self._process:  # whoever held the lock is not in this process
            raise TierError(
                "this process was forked while the optimizer's state was on the "
                f"{self._way.name} tier, where it belongs to the process that it was forked from; start processes "
                "before the forward or after optimizer.step(), or read the state (optimizer.state_dict()) first",
                tier=self._way.name,
            )
        with self._lock:
            while self.left:
                each = self.left[-1]
                tensor = each.tensor()
                if tensor is not None and is_offloaded(tensor):
                    fill(tensor, functools.partial(self._read, each))
                    self._traffic.in_bytes += each.slot.bytes
                elif tensor is not None:
                    forget(tensor)
                self._seen_all &= tensor is not None
                del tensor
                if self.left and self.left[-1] is each:
                    self.left.pop()
            if self._seen_all and not self._copied:
                self._end()

    def _asked(self, each: _Left, tensor: torch.Tensor) -> None:
        """``tensor`` is about to be read.

        Maybe by a finalizer of garbage that it is a part of: then no weak reference leads to it any more.
        """
        self._asking.append(None)
        try:
            self.back()
            with self._lock:
                if is_offloaded(tensor):
                    fill(tensor, functools.partial(self._read, each))
        finally:
            self._asking.pop()

    def _read(self, each: _Left, tensor: torch.Tensor) -> None:
        copy = self._way.fetch(self._region, each.slot, tensor, each.copy, _nothing, timed=self._traffic.timed)
        copy.join(self._traffic)
        if copy.failure:
            raise TierError(
                f"bringing {each.slot.name} back from the {each.slot.tier} tier failed: {copy.failure}. It is still "
                "there and is fetched again when it is read next; see to the disk, or go on from a checkpoint",
                tier=each.slot.tier,
            )


def _nothing() -> None:
    """After a copy there is nothing to do: whoever issued it waits for it."""


def _give_back(way: Way, region: object, process: int) -> None:
    if os.getpid() == process:
        way.give_back(region)


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
