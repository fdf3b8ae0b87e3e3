"""Gradients that reach a fitted model's parameters in a backward in which no planned step ran.

1. A backward is *planned* if the backward of a planned step, of whatever fitted model, ran in it. What else runs in the
   same backward, such as an auxiliary loss, is measured as part of the loss outside.
2. Whether another has given a parameter its gradient is known from hooks on autograd's leaves. They cost a microsecond
   for each parameter and backward, so they are there from ``fit`` on until an optimizer steps and every backward since
   its last step was planned, and again once one was not: it may be another model's.
3. A gradient that is dropped before the next one comes, as after a look at saliency or a norm, trains nothing.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ebbflow.torch_seams.autograd import backwards_begun, current_graph_task_id, gradient_leaf
from ebbflow.torch_seams.optimizers import gradient_of

__all__ = ["Arrivals", "note_planned", "unplanned_backwards"]

_RECENT = 1024

_lock = threading.Lock()
_planned: dict[int, None] = {}
_planned_in_all = 0
_watching: weakref.WeakSet[Arrivals] = weakref.WeakSet()


def note_planned() -> None:
    """The backward of a planned step begins on this thread."""
    global _planned_in_all
    task = current_graph_task_id()
    if task in _planned:
        return
    with _lock:
        _planned_in_all += 1
        _planned[task] = None
        if len(_planned) > _RECENT:
            del _planned[next(iter(_planned))]
        watching = list(_watching)
    for each in watching:
        each.was_planned(task)


def unplanned_backwards() -> int | None:
    """How many backwards of this process were not planned, of captures too; ``None`` if a backward asks."""
    begun = backwards_begun()
    return None if begun is None else begun - _planned_in_all


class Arrivals:
    """Of one fitted model (definition 2)."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._leaves: list[Any] = []  # autograd itself keeps none that no graph has
        self._watched: list[tuple[int, torch.Size]] = []
        self._besides: dict[int, set[int]] = {}

    @property
    def watches(self) -> bool:
        """Whether hooks are there."""
        return bool(self._hooks)

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Look at the gradients that ``parameters`` get from now on."""
        trained = [each for each in parameters if each.requires_grad and not each.is_inference()]
        if self._watched == (wanted := [(id(each), each.shape) for each in trained]):
            return
        self.close()
        me: weakref.ref[Arrivals] = weakref.ref(self)
        for each in trained:
            leaf = gradient_leaf(each)
            self._leaves.append(leaf)
            self._hooks.append(leaf.register_prehook(functools.partial(_arrives, me, weakref.ref(each))))
        self._watched = wanted
        with _lock:
            _watching.add(self)

    def call_begins(self, parameters: Iterable[torch.nn.Parameter], *, first: bool) -> None:
        """A planned call of the model begins, and its graph takes the leaves that are there.

        A leaf knows the shape that its parameter had when it was made, and the stream: that of the ``first`` call is
        where the model trains.
        """
        if not self._hooks:
            return
        if first:
            self.close()
        self.watch(parameters)

    def close(self) -> None:
        """Look no longer; what has come is still judged."""
        with _lock:
            _watching.discard(self)
        for each in self._hooks:
            each.remove()
        self._hooks, self._leaves, self._watched = [], [], []

    def was_planned(self, task: int) -> None:
        """Backward ``task``, in which gradients may have come before the planned step, is planned."""
        for key, tasks in tuple(self._besides.items()):
            tasks.discard(task)
            if not tasks:
                self._besides.pop(key, None)

    def arrived(self, parameter: torch.Tensor) -> None:
        """``parameter`` is about to get a gradient from the backward of this thread."""
        task, key = current_graph_task_id(), id(parameter)
        if key in self._besides and _is_dropped(parameter):
            del self._besides[key]
        if task not in _planned:
            self._besides.setdefault(key, set()).add(task)

    def besides(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether a backward that was not planned gave one of ``parameters`` its gradient, or a part of it."""
        return bool(self._besides) and not all(_is_dropped(each) for each in parameters if id(each) in self._besides)

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """An optimizer steps ``parameters``, and the next gradients are other ones."""
        if self._besides:
            for each in parameters:
                self._besides.pop(id(each), None)


def _arrives(arrivals: weakref.ref[Arrivals], parameter: weakref.ref[torch.Tensor], _: Any) -> None:
    told, target = arrivals(), parameter()
    if told is not None and target is not None:
        told.arrived(target)


def _is_dropped(parameter: torch.Tensor) -> bool:
    """Definition 3; zeros are what ``zero_grad(set_to_none=False)`` leaves."""
    gradient = gradient_of(parameter)
    return gradient is None or not (gradient.coalesce().values() if gradient.is_sparse else gradient).any()
