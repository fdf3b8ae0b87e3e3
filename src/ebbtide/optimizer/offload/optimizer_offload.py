"""State of optimizers that is on another tier while a step runs, and back in place for whatever an optimizer does.

1. *State* is what an optimizer keeps per parameter. No op of a step reads it: it can be offloaded from before the
   forward until the optimizer's step, with every reference to it valid (``torch_seams.offloaded``).
2. What is sent is copied first, all of it, and only then gives its memory back. A copy that fails leaves everything
   where it was. Small tensors, and those whose memory somebody else uses too, stay: they are resident.
3. It comes back all at once when the optimizer steps (after a closure again, in which forwards send it away), gives
   its ``state_dict()`` or loads one. Whoever else reads it before that is refused by name. If a copy fails it stays
   offloaded and can be tried again, but what is state no more, since other state was loaded in its place, keeps nobody
   from stepping.
4. It leaves at every training call for which it has been back, changed or not: what is rewritten through ``.data`` has
   no mark.
5. State that there is when the offload is made, and state that is loaded, is given memory that can be emptied: that of
   what ``torch.load`` has read cannot. So is state that has left before, if NumPy has looked at it since.
6. What is offloaded belongs to the process that sent it. In one that was forked from it, it cannot be brought back.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from ebbtide.errors import TierError
from ebbtide.measurement.resident import as_stepping, kept_by, optimizers_in
from ebbtide.optimizer.cost.forecast import Forecast, forecast_offload, is_moved
from ebbtide.optimizer.offload.batch import Batch
from ebbtide.optimizer.state.options import settings_of
from ebbtide.torch_seams.compile_mode import left_out_of_traces
from ebbtide.torch_seams.offloaded import can_offload, is_offloaded, own_memory
from ebbtide.torch_seams.optimizers import closure_in, first_of_step_pre_hooks, parameters_stepped_by, with_closure
from ebbtide.transfers.paths import TransferPath
from ebbtide.transfers.traffic import Traffic
from ebbtide.user_objects import elements_of, is_a

__all__ = ["OptimizerOffload", "offload_of"]


class OptimizerOffload:
    """The state of one optimizer, sent away and brought back.

    Args:
        optimizer: not kept alive.
        path: the tier.

    Attributes:
        path: that state leaves by from now on. The model that is fitted last says.
        traffic: what has moved since the state left last.
        users: models that it is for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, path: TransferPath) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.path = path
        self._lock = threading.RLock()
        self._batches: list[Batch] = []
        self._left_once: dict[int, weakref.ref[torch.Tensor]] = {}
        self.traffic = Traffic(timed=path.always_timed)
        before_step = left_out_of_traces(self._before_step, "Ebbtide brings the state back here")
        self._hooks = [
            hook
            for each in optimizers_in(optimizer)
            if "defaults" in vars(each)  # else it was never made as one, and passes on to one that was
            for hook in (
                first_of_step_pre_hooks(each, before_step),
                each.register_state_dict_pre_hook(self._before_state_dict, prepend=True),
                each.register_load_state_dict_pre_hook(self._before_loading, prepend=True),
                each.register_load_state_dict_post_hook(self._after_loading),
            )
        ]
        _give_own_memory(optimizer)
        self.users = 0
        self._moving_bytes = 0
        self._forecast: tuple[object, Forecast] = (None, Forecast())

    def send(self) -> None:
        """Offload all state that can leave (definition 2).

        Raises:
            TierError: if the tier has no room, or a copy failed. Nothing has left then.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        with self._lock:
            self._batches = [each for each in self._batches if each.offloaded_bytes()]
            state = [each for each in _state(optimizer) if not is_offloaded(each) and is_moved(_bytes_of(each))]
            for each in state:
                if self._has_left(each):
                    own_memory(each)  # NumPy has seen it
            leaving = [each for each in state if can_offload(each)]
            each = state = None  # nothing but its container may hold what leaves
            if leaving:
                self._left_once |= {id(each): weakref.ref(each) for each in leaving}
                self.traffic = Traffic(timed=self.path.always_timed)
                refusal = (
                    f"state of {type(optimizer).__name__} that is on the {self.path.name} tier from the forward to "
                    "optimizer.step() (offload_optimizer=True). Read optimizer.state_dict(), which brings it back, "
                    "or read it after optimizer.step(); ebbtide.unfit(model) brings it back for good"
                )
                self._batches.append(Batch(leaving, self.path, self.traffic))
                self._batches[-1].empty(leaving, refusal)
            self._moving_bytes = sum(each.offloaded_bytes() for each in self._batches)

    def _has_left(self, tensor: torch.Tensor) -> bool:
        """Whether it has before, so that its memory is torch's."""
        reference = self._left_once.get(id(tensor))
        return reference is not None and reference() is tensor

    def bring_back(self) -> None:
        """Bring all of the state back (definition 3).

        Raises:
            TierError: if a copy failed.
        """
        with self._lock:
            for batch in self._batches.copy():
                try:
                    batch.bring_back()
                except TierError:
                    optimizer = self._optimizer()
                    if optimizer is not None and batch.holds_any(_state(optimizer)):
                        raise
                if batch in self._batches:
                    self._batches.remove(batch)

    def _before_step(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Bring it back, and again after a closure, whose forward sends it away; gives what is called in its place."""
        self.bring_back()
        if (closure := closure_in(args, kwargs)) is None:
            return None
        called: Callable[[], Any] = closure

        def called_and_back() -> Any:
            result = called()
            self.bring_back()
            return result

        return with_closure(args, kwargs, called_and_back)

    def _before_state_dict(self, _: object) -> None:
        self.bring_back()

    def _before_loading(self, *_: object) -> None:
        """Bring it back: what is loaded may be made of it. Where that fails, what is loaded takes its place."""
        with suppress(TierError):
            self.bring_back()

    def _after_loading(self, optimizer: torch.optim.Optimizer) -> None:
        _give_own_memory(optimizer)

    @property
    def forecast(self) -> Forecast:
        """What is counted of the optimizer, looked at again where what that depends on has changed."""
        optimizer = self._optimizer()
        assert optimizer is not None, "a fitted model holds its optimizer"
        parts, groups = optimizers_in(optimizer), optimizer.param_groups
        parameters = [(id(each), each.requires_grad) for each in parameters_stepped_by(optimizer)]
        states, settings = [len(each.state) for each in parts], settings_of(vars(optimizer), *groups)
        key = (states, parameters, settings, self._moving_bytes, self.path.name)
        if self._forecast[0] != key:
            self._forecast = (key, forecast_offload(optimizer, self._moving_bytes, self.path.name))
        return self._forecast[1]

    def release(self) -> None:
        """Let go of it for one model. After the last one, what is offloaded comes back and nothing moves any more.

        Raises:
            TierError: if a copy failed; it is tried again by the next ``optimizer.step()`` or ``state_dict()``.
        """
        self.users -= 1
        optimizer = self._optimizer()
        if not self.users and optimizer is not None:
            _offloads.pop(optimizer, None)
        self.bring_back()
        if not self.users:
            for hook in self._hooks:
                hook.remove()


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Plain tensors of its state on the devices of its parameters, each once; parameters and gradients are no state."""
    parameters = parameters_stepped_by(optimizer)
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
    if is_a(value, torch.Tensor):
        yield value
    elif is_a(value, dict, list, tuple) and (found := elements_of(value)) is not None:
        for each in found[1]:
            yield from _tensors(each)


_offloads: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerOffload] = weakref.WeakKeyDictionary()


def offload_of(optimizer: torch.optim.Optimizer, path: TransferPath) -> OptimizerOffload:
    """The one of ``optimizer``, which models that share it share; each has to :meth:`~OptimizerOffload.release` it."""
    optimizer = as_stepping(optimizer)
    found = _offloads.get(optimizer)
    if found is None:
        _offloads[optimizer] = found = OptimizerOffload(optimizer, path)
    found.path = path
    found.users += 1
    return found


def _give_own_memory(optimizer: torch.optim.Optimizer) -> None:
    """Make what is large able to leave (definition 5)."""
    for each in _state(optimizer):
        if not is_offloaded(each) and is_moved(_bytes_of(each)):
            own_memory(each)
