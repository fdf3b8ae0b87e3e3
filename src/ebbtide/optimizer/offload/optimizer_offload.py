"""State of optimizers that is on another tier while a step runs, and back in place when somebody reads it.

1. *State* is what an optimizer keeps per parameter. No op of a step reads it: it can be away from before the forward
   until the optimizer's step, with every reference to it valid (``torch_seams.offloaded``).
2. What *leaves* is copied first, all of it, and only then gives its memory back. A copy that fails leaves everything
   where it was. Small tensors, and those whose memory somebody else uses too, stay: they are resident.
3. It comes *back* all at once before any of it is read: by the optimizer's step, by ``state_dict()``, by user code on
   any thread. If that fails it stays away, so that it can be tried again. What is state no more, since other state was
   loaded in its place, keeps nobody from stepping: it is away until somebody reads it.
4. It leaves at every training call, also if it was only read: what is rewritten through ``.data`` has no mark.
5. State that there is when a parking is made, and state that is loaded, is given memory that can leave: that of what
   ``torch.load`` has read cannot. So is state that has left before, if NumPy has looked at it since.
6. What is away belongs to the process that sent it. In one that was forked from it, it cannot be read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import torch

from ebbtide.errors import TierError
from ebbtide.measurement.resident import kept_by, optimizers_in, stepping
from ebbtide.optimizer.offload.batch import Batch
from ebbtide.torch_seams.offloaded import can_offload, is_offloaded, own_memory
from ebbtide.torch_seams.stance import left_out_of_traces
from ebbtide.transfers.traffic import Traffic
from ebbtide.transfers.ways import Way

__all__ = ["LEAST_BYTES", "OptimizerOffload", "is_moved", "offload_of"]

LEAST_BYTES = 64 * 2**10
"""Smaller tensors of state stay."""


class OptimizerOffload:
    """The state of one optimizer.

    Args:
        optimizer: not kept alive.
        way: the tier.

    Attributes:
        way: that state leaves by from now on. The model that is fitted last says.
        traffic: what has moved since the state left last.
        users: models that it is for.
        moving_bytes: that were away after :meth:`leave`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, way: Way) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.way = way
        self._lock = threading.RLock()
        self._lots: list[Batch] = []
        self._left_once: dict[int, weakref.ref[torch.Tensor]] = {}
        self.traffic = Traffic(timed=way.always_timed)
        self._hooks = (
            optimizer.register_step_pre_hook(left_out_of_traces(_before_step, "Ebbtide brings the state back here")),
            optimizer.register_load_state_dict_post_hook(_can_leave),
        )
        _can_leave(optimizer)
        self.users = 0
        self.moving_bytes = 0

    def leave(self) -> None:
        """Definition 2.

        Raises:
            TierError: if the tier has no room, or a copy failed. Nothing has left then.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        with self._lock:
            self._lots = [lot for lot in self._lots if lot.still_away()]
            state = [
                each for each in _state(optimizer) if is_offloaded(each) or is_moved(each.untyped_storage().nbytes())
            ]
            for each in state:
                if not is_offloaded(each) and self._has_left(each):
                    own_memory(each)  # NumPy has seen it
            leaving = [each for each in state if not is_offloaded(each) and can_offload(each)]
            each = state = None
            if leaving:
                self._left_once |= {id(each): weakref.ref(each) for each in leaving}
                self.traffic = Traffic(timed=self.way.always_timed)
                lot = Batch(leaving, self.way, self.traffic)
                self._lots.append(lot)
                lot.leave(leaving)
            self.moving_bytes = sum(each.slot.bytes for lot in self._lots for each in lot.left)

    def _has_left(self, tensor: torch.Tensor) -> bool:
        """Whether it has before, so that its memory is torch's."""
        known = self._left_once.get(id(tensor))
        return known is not None and known() is tensor

    def back(self) -> None:
        """Definition 3.

        Raises:
            TierError: if a copy failed.
        """
        with self._lock:
            for lot in self._lots.copy():
                try:
                    lot.back()
                except TierError:
                    optimizer = self._optimizer()
                    if optimizer is not None and lot.holds_any(_state(optimizer)):
                        raise
                    self._lots.remove(lot)
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


def is_moved(size: int) -> bool:
    """Whether a tensor of state of so many bytes is large enough to leave."""
    return size >= LEAST_BYTES


def _state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Plain tensors of its state on the devices of its parameters, each once; parameters and gradients are no state."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    devices = {each.device for each in parameters}
    seen = {id(each) for parameter in parameters for each in (parameter, parameter.grad)}
    for each in _tensors([kept_by(part) for part in optimizers_in(optimizer)]):
        if id(each) in seen:
            continue
        seen.add(id(each))
        plain = type(each) is torch.Tensor and each.layout is torch.strided and each.device in devices
        if plain or is_offloaded(each):
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


_parkings: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerOffload] = weakref.WeakKeyDictionary()


def offload_of(optimizer: torch.optim.Optimizer, way: Way) -> OptimizerOffload:
    """The one of ``optimizer``, which models that share it share; each has to :meth:`~OptimizerOffload.end` it."""
    optimizer = stepping(optimizer)
    found = _parkings.get(optimizer)
    if found is None:
        _parkings[optimizer] = found = OptimizerOffload(optimizer, way)
    found.way = way
    found.users += 1
    return found


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    found = _parkings.get(optimizer)
    if found is not None:
        found.back()


def _can_leave(optimizer: torch.optim.Optimizer) -> None:
    """Definition 5."""
    for each in _state(optimizer):
        if not is_offloaded(each) and is_moved(each.untyped_storage().nbytes()):
            own_memory(each)
