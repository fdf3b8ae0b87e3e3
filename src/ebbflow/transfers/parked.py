"""State of optimizers that is on another tier while a step runs, and back in place when somebody reads it.

1. *State* is what an optimizer keeps per parameter. No op of a step reads it: it can be away from before the forward
   until the optimizer's step, with every reference to it valid (``torch_seams.away``).
2. What *leaves* is copied first, all of it, and only then gives its memory back. A copy that fails leaves everything
   where it was. Small tensors, and those whose memory somebody else uses too, stay: they are resident.
3. It comes *back* all at once before any of it is read: by the optimizer's step, by ``state_dict()``, by user code on
   any thread. If that fails it stays away, so that it can be tried again.
4. It leaves at every training call, also if it was only read: what is rewritten through ``.data`` has no mark.
5. State that there is when a parking is made, and state that is loaded, is given memory that can leave: that of what
   ``torch.load`` has read cannot.
6. What is away belongs to the process that sent it. In one that was forked from it, it cannot be read.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ebbflow.errors import TierError
from ebbflow.torch_seams.away import can_leave, empty, fill, is_away, own_memory
from ebbflow.transfers.slots import Slot, Space, region_bytes
from ebbflow.transfers.traffic import Traffic
from ebbflow.transfers.ways import Copy, Way

__all__ = ["LEAST_BYTES", "Parking", "moves", "parking_of"]

LEAST_BYTES = 64 * 2**10
"""Smaller tensors of state stay."""


@dataclass(frozen=True, slots=True)
class _Left:
    """A tensor that is away, not kept alive, with its place and the copy that took it there."""

    tensor: weakref.ref[torch.Tensor]
    slot: Slot
    copy: Copy


class Parking:
    """The state of one optimizer.

    Args:
        optimizer: not kept alive.
        way: the tier.

    Attributes:
        traffic: what has moved since the state left last.
        users: models that it is for.
        moving_bytes: that were away after :meth:`leave`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, way: Way) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._way = way
        self._lock = threading.RLock()
        self._lots: list[_Lot] = []
        self.traffic = Traffic(timed=way.always_timed)
        self._hooks = (
            optimizer.register_step_pre_hook(_before_step),
            optimizer.register_load_state_dict_post_hook(_can_leave),
        )
        _can_leave(optimizer)
        self.users = 0
        self.moving_bytes = 0

    @property
    def way(self) -> Way:
        """The tier."""
        return self._way

    def leave(self) -> None:
        """Definition 2.

        Raises:
            TierError: if the tier has no room, or a copy failed. Nothing has left then.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        with self._lock:
            self._lots = [lot for lot in self._lots if lot.left]
            state = [each for each in _state(optimizer) if is_away(each) or moves(each.untyped_storage().nbytes())]
            leaving = [each for each in state if not is_away(each) and can_leave(each)]
            if leaving:
                self.traffic = Traffic(timed=self._way.always_timed)
                self._lots.append(_Lot(leaving, self._way, self.traffic))
            self.moving_bytes = sum(lot.bytes for lot in self._lots)

    def back(self) -> None:
        """Definition 3.

        Raises:
            TierError: if a copy failed.
        """
        with self._lock:
            for lot in self._lots:
                lot.back()
            self._lots = [lot for lot in self._lots if lot.left]

    def end(self) -> None:
        """A model uses it no more. After the last one it brings back what is away and moves nothing from then on."""
        self.users -= 1
        if not self.users:
            for hook in self._hooks:
                hook.remove()
            optimizer = self._optimizer()
            if optimizer is not None:
                _parkings.pop(optimizer, None)
        self.back()


class _Lot:
    """What left together, in one region.

    Raises:
        TierError: if the tier has no room, or a copy failed.
    """

    def __init__(self, tensors: list[torch.Tensor], way: Way, traffic: Traffic) -> None:
        self._way, self._traffic = way, traffic
        self._process = os.getpid()
        self._lock = threading.RLock()
        slots = list(_slots(tensors, way.name))
        self.bytes = sum(slot.bytes for slot in slots)
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
        self.left: list[_Left] = []
        for tensor, slot, copy in zip(tensors, slots, copies, strict=True):
            self.left.append(_Left(weakref.ref(tensor), slot, copy))
            empty(tensor, self.back)
            traffic.out_bytes += slot.bytes

    def back(self) -> None:
        """Bring back what is alive."""
        with self._lock:
            if self.left and os.getpid() != self._process:
                raise TierError(
                    "this process was forked while the optimizer's state was on the "
                    f"{self._way.name} tier, where it belongs to the process that it was forked from; start processes "
                    "before the forward or after optimizer.step(), or read the state (optimizer.state_dict()) first",
                    tier=self._way.name,
                )
            while self.left:
                each = self.left[-1]
                tensor = each.tensor()
                if tensor is not None and is_away(tensor):
                    fill(tensor, functools.partial(self._read, each))
                    self._traffic.in_bytes += each.slot.bytes
                del tensor
                self.left.pop()
            self._end()

    def _read(self, each: _Left, tensor: torch.Tensor) -> None:
        copy = self._way.fetch(self._region, each.slot, tensor, each.copy, _nothing, timed=self._traffic.timed)
        try:
            copy.join(self._traffic)
        except BaseException:  # of a wait that is interrupted: the copy goes on
            copy.join(self._traffic)
            raise
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


def moves(size: int) -> bool:
    """Whether a tensor of state of so many bytes is large enough to leave."""
    return size >= LEAST_BYTES


def _state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Tensors of its state on the device of their parameter, each once; parameters and gradients are not state."""
    seen: set[int] = set()
    for parameter, state in optimizer.state.items():
        for each in _tensors(state):
            own = each is parameter or each is parameter.grad
            if id(each) not in seen and not own and (is_away(each) or each.device == parameter.device):
                seen.add(id(each))
                yield each


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


_parkings: weakref.WeakKeyDictionary[torch.optim.Optimizer, Parking] = weakref.WeakKeyDictionary()


def parking_of(optimizer: torch.optim.Optimizer, way: Way) -> Parking:
    """The one of ``optimizer``; models that share an optimizer share it, and :meth:`Parking.end` it one by one."""
    found = _parkings.get(optimizer)
    if found is None:
        _parkings[optimizer] = found = Parking(optimizer, way)
    found.users += 1
    return found


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    found = _parkings.get(optimizer)
    if found is not None:
        found.back()


def _can_leave(optimizer: torch.optim.Optimizer) -> None:
    """Definition 5."""
    for each in _state(optimizer):
        if not is_away(each) and moves(each.untyped_storage().nbytes()):
            own_memory(each)
