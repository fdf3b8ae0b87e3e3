"""Calls of ``zero_grad`` of any optimizer or module on this thread, as long as somebody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from ebbtide.torch_seams.optimizers import parameters_stepped_by
from ebbtide.torch_seams.patches import Attribute, Patch, wrapped
from ebbtide.torch_seams.storages import parameters_in

__all__ = ["watch_zero_grad"]

_OF: tuple[tuple[type, Callable[[Any], Iterable[torch.Tensor]]], ...] = (
    (torch.optim.Optimizer, parameters_stepped_by),
    (torch.nn.Module, parameters_in),
)


def watch_zero_grad(note: Callable[[Iterable[torch.Tensor]], None]) -> ExitStack:
    """Call ``note`` with the parameters whose gradients are dropped, until what is returned is closed or garbage.

    Gradients that are set to zeros stay, and are not noted.
    """
    stack = ExitStack()
    for owner, parameters in _OF:
        stack.enter_context(_watch(owner, parameters, note))
    return stack


def _watch(
    owner: type, parameters: Callable[[Any], Iterable[torch.Tensor]], note: Callable[[Iterable[torch.Tensor]], None]
) -> Patch:
    def make(below: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(self: Any, set_to_none: bool = True) -> None:
            below(self, set_to_none)
            if set_to_none:
                note(parameters(self))

        return zero_grad

    return wrapped(Attribute(owner, "zero_grad"), make, this_thread=True)
