"""Gradients that reach a fitted model's parameters in a backward in which no planned step ran.

1. A backward is *planned* if the backward of a planned step, of whatever fitted model, ran in it, or a planned call was
   made again in it, as reentrant checkpoints do; so is one inside of it, which code between pieces may begin. What else
   runs in the same backward, such as an auxiliary loss, is measured as part of the loss outside.
2. Whether another has given a parameter its gradient is known from hooks on autograd's leaves. They cost a microsecond
   for each parameter and backward, so they are there from ``fit`` on until :data:`_FIRST` steps of optimizers have had
   no other backwards than planned ones before them, and again once there was another: it may be another model's. They
   then stay for :data:`_PATIENCE` times as many such steps as before, since loops take turns.
3. A gradient that is dropped before the next one comes, as after a look at saliency or a norm, trains nothing.
4. What is frozen keeps its hook, since whoever trains two models in turns freezes and thaws them.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ebbtide.torch_seams.autograd import (
    backwards_begun,
    current_graph_task_id,
    gradient_leaf,
    in_backward,
    when_backward_ends,
)
from ebbtide.torch_seams.optimizers import gradient_of

__all__ = ["Backwards", "GradientWatcher", "backwards_so_far", "note_planned", "note_planned_again", "own_backwards"]

_RECENT = 1024
_PATIENCE = 16
_FIRST = 8

_lock = threading.Lock()
_planned: dict[int, None] = {}
_running: dict[int, int] = {}  # planned ones that have not ended, and the threads that their planned steps ran on
_planned_in_all = 0
_own_in_all = 0
_watching: weakref.WeakSet[GradientWatcher] = weakref.WeakSet()


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
        _running[task] = threading.get_ident()
        watching = list(_watching)
    if in_backward():
        when_backward_ends(functools.partial(_ended, task))
    for each in watching:
        each.was_planned(task)


def _ended(task: int) -> None:
    _running.pop(task, None)


def note_planned_again() -> None:
    """A planned call begins; inside of a backward its own backward will be one inside of that."""
    if in_backward():
        note_planned()
    else:
        _running.clear()  # those that have failed


class Backwards(NamedTuple):
    """Backwards of this process so far.

    Attributes:
        planned: of definition 1.
        others: the rest but for Ebbtide's own; ``None`` if a backward asks.
    """

    planned: int
    others: int | None


def backwards_so_far() -> Backwards:
    """How many there were."""
    begun = backwards_begun()
    return Backwards(_planned_in_all, None if begun is None else begun - _planned_in_all - _own_in_all)


@contextmanager
def own_backwards() -> Iterator[None]:
    """While open, backwards are those of captures, and nobody trains by them."""
    global _own_in_all
    before = backwards_so_far().others
    try:
        yield
    finally:
        after = backwards_so_far().others
        if before is not None and after is not None:
            with _lock:
                _own_in_all += after - before


class GradientWatcher:
    """Sees gradients arrive at the parameters of one fitted model (definition 2)."""

    def __init__(self) -> None:
        self._open = False
        self._come: set[int] = set()
        self._stepped_in: set[int] = set()
        self._patience, self._quiet = _FIRST, 0
        self._leaves: dict[int, _Leaf] = {}
        self._besides: dict[int, set[int]] = {}

    @property
    def watches(self) -> bool:
        """Whether hooks are there."""
        return self._open

    def others_were_there(self, parameters: Iterable[torch.Tensor]) -> None:
        """A backward was not planned; ``parameters`` are all of the model."""
        if not self._open:
            self._patience *= _PATIENCE
        self._quiet = 0
        self.watch(parameters)

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Look at the gradients that ``parameters``, all of the model, get from now on."""
        if not self._open:
            self._open = True
            with _lock:
                _watching.add(self)
        own = [each for each in parameters if each.is_leaf and not each.is_inference()]
        gone = self._leaves.keys() - set(map(id, own))
        for key in gone:
            self._leaves.pop(key).hook.remove()
        first = next((each for each in own if id(each) in self._leaves), None)
        if first is not None and _leaf_of(first) not in (None, self._leaves[id(first)].node):
            for key in list(self._leaves):  # autograd has made others: the model was elsewhere, and is back
                self._leaves.pop(key).hook.remove()
        for each in own:
            if id(each) in self._leaves and not self._leaves[id(each)].is_of(each):
                self._leaves.pop(id(each)).hook.remove()  # which may be the last that has the old leaf
            if each.requires_grad and id(each) not in self._leaves:
                self._leaves[id(each)] = _Leaf(each, functools.partial(_arrives, weakref.ref(self), id(each)))

    def call_begins(self, parameters: Iterable[torch.Tensor], *, first: bool) -> None:
        """A planned call of the model begins, and its graph takes the leaves that are there.

        A leaf knows shape, type and place that its parameter had when it was made, and the stream: that of the
        ``first`` call is where the model trains.
        """
        if not self._open:
            return
        if first:
            self._release()
        own = list(parameters)
        if all(each.is_leaf for each in own):  # or a call with other parameters than the model's, for the moment
            self.watch(own)

    def all_were_planned(self) -> None:
        """An optimizer has stepped without others: look no longer, if that is so for a while and all is judged."""
        self._quiet += 1
        if self._open and self._quiet >= self._patience:
            self._drop()
            if not self._besides:
                self.end()

    def end(self) -> None:
        """Look no longer."""
        self._open = False
        with _lock:
            _watching.discard(self)
        self._release()

    def _release(self) -> None:
        for each in self._leaves.values():
            each.hook.remove()
        self._leaves = {}
        self._come.clear()

    def _drop(self) -> None:
        """Forget what definition 3 lets go."""
        for key in list(self._besides):
            found = self._leaves.get(key)
            if found is None or gradient_of(found.parameter) is None:
                self._besides.pop(key, None)

    def was_planned(self, task: int) -> None:
        """Backward ``task``, in which gradients may have come before the planned step, is planned."""
        if not self._besides:
            return
        self._drop()
        for key, tasks in list(self._besides.items()):
            if task in tasks:
                tasks.discard(task)
                self._come.add(key)
            if not tasks:
                self._besides.pop(key, None)

    def arrived(self, key: int) -> None:
        """The parameter is about to get a gradient from the backward of this thread."""
        task = current_graph_task_id()
        if key in self._besides and (found := self._leaves.get(key)) is not None and _is_dropped(found.parameter):
            del self._besides[key]
        if task in _planned or threading.get_ident() in _running.values():
            self._come.add(key)
        else:
            self._besides.setdefault(key, set()).add(task)
            if key in self._come and (found := self._leaves.get(key)) is not None:
                if gradient_of(found.parameter) is None:  # what had come was dropped
                    self._come.discard(key)

    def besides(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether a backward that was not planned gave one of ``parameters`` its gradient, or a part of it."""
        here = current_graph_task_id()
        late = [each for each in self._stepped_in if each != here and each not in _planned]
        self._stepped_in.intersection_update([here])
        if late:
            return True
        if not self._besides:
            return False
        return not all(_is_dropped(each) for each in parameters if self._besides.get(id(each), set()) - {here})

    def step_in_backward(self) -> None:
        """An optimizer steps inside of a backward whose planned step has not begun; it is judged at the next step."""
        self._stepped_in.add(current_graph_task_id())

    def have_come(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether hooks saw a planned backward, of whatever model, give one of ``parameters`` its gradient."""
        return not self._come.isdisjoint(map(id, parameters))

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """An optimizer steps ``parameters``, and the next gradients are other ones."""
        if self._besides or self._come:
            for each in parameters:
                self._besides.pop(id(each), None)
                self._come.discard(id(each))


class _Leaf:
    """The hook of one parameter; autograd itself keeps no leaf that no graph has."""

    __slots__ = ("_kind", "hook", "node")

    def __init__(self, parameter: torch.Tensor, arrives: Callable[[Any], None]) -> None:
        self.node = gradient_leaf(parameter)
        self.hook = self.node.register_prehook(arrives)
        self._kind = (parameter.shape, parameter.dtype, parameter.device)

    @property
    def parameter(self) -> torch.Tensor:
        """Whose gradient comes here; no reference of Python's, so that it may be swapped."""
        return self.node.variable

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is as it was."""
        return self._kind == (parameter.shape, parameter.dtype, parameter.device)


def _leaf_of(parameter: torch.Tensor) -> Any:
    """The autograd node that accumulates a parameter's gradient; ``None`` for a frozen one."""
    return gradient_leaf(parameter) if parameter.requires_grad else None


def _arrives(watcher: weakref.ref[GradientWatcher], key: int, _: Any) -> None:
    if (told := watcher()) is not None:
        told.arrived(key)


def _is_dropped(parameter: torch.Tensor) -> bool:
    """Whether a gradient has been cleared (definition 3): zeros are what ``zero_grad(set_to_none=False)`` leaves."""
    gradient = gradient_of(parameter)
    return gradient is None or not (gradient.coalesce().values() if gradient.is_sparse else gradient).any()
