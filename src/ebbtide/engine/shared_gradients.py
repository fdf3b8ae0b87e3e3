"""Gradients that a step adds up for itself, of tensors that others read as well: said once, for the last bits differ.

A tensor that a step reads several times gets one gradient from it, the sum. Where something outside of the step reads
the tensor too, eager adds all terms one by one, in the order in which they come; here the step's come as one.

1. The first time that a step's code runs, the nodes are watched that its sums go to.
2. What arrives there is the step's own tensor, untouched, unless something was added.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ebbtide.engine.step_code import StepCode
from ebbtide.faults import users_level
from ebbtide.torch_seams.optimizers import has_gradient_hooks
from ebbtide.torch_seams.storages import version_of

__all__ = ["SharedGradients", "watch_sums"]

_SAID = (
    "a tensor that the model reads several times {0}. Eager adds its gradients one by one, here those of a call come "
    "as one sum, so it differs by about 1e-7 of its norm (4e-3 under bfloat16 autocast). For eager's bits fit {1}"
)
_BY_OTHERS = "is read outside of it too (by a loss, or another model)", "the whole model"
_BY_CALLS = (
    "is read by several calls before one backward",
    "a module whose forward makes these calls and returns what they return",
)
_seen: weakref.WeakSet[StepCode] = weakref.WeakSet()


class SharedGradients:
    """The sums of one pending step, on their way.

    Args:
        node: of the step.
        sums: per primal whose gradient is a sum, its place among the tensors that go in.
        backwards: how many of the model's have begun.
    """

    def __init__(self, node: Any, sums: Mapping[int, int], backwards: Callable[[], int]) -> None:
        self._backwards, self._backwards_before = backwards, backwards()
        self._given: dict[int, tuple[int, int]] = {}
        self._handles: list[Any] = []
        for position, entry in sums.items():
            below, place = node.next_functions[entry]
            leaf = getattr(below, "variable", None)  # whose own hooks may give something else than they get
            if below is not None and (leaf is None or not has_gradient_hooks(leaf)):
                hook = functools.partial(self._arrives, position, place)
                self._handles.append(below.register_prehook(hook))

    def note(self, gradients: Sequence[Any]) -> None:
        """The step's backward gives ``gradients``, one per primal."""
        self._given = {
            position: (each.data_ptr(), version_of(each))
            for position, each in enumerate(gradients)
            if isinstance(each, torch.Tensor)
        }

    def end(self) -> None:
        """Watch no longer."""
        for each in self._handles:
            each.remove()
        self._handles.clear()

    def _arrives(self, position: int, place: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        given, arrived = self._given.get(position), gradients[place]
        if given is None or arrived is None:
            return
        self.end()
        if (arrived.data_ptr(), version_of(arrived)) != given:
            called_again = self._backwards() > self._backwards_before + 1
            warnings.warn(_SAID.format(*(_BY_CALLS if called_again else _BY_OTHERS)), stacklevel=users_level())


def watch_sums(node: Any, code: StepCode, backwards: Callable[[], int]) -> SharedGradients | None:
    """What watches the sums of a step of ``code`` that has just run; ``None`` if there is none, or no first time.

    Args:
        node: of the step.
        code: of it.
        backwards: how many of the model's have begun.
    """
    if not code.sums or code in _seen:
        return None
    _seen.add(code)
    return SharedGradients(node, code.sums, backwards)
