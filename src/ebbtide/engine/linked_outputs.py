"""Outputs that other outputs are computed from: a planned step has no gradient of theirs as eager has it.

1. A step is one node of autograd's graph. An output is *linked* to the others of its forward that gradients come
   through on their way to it.
2. Eager's gradient of a linked output has what comes through those others too, a planned step's only what comes from
   outside. So a backward that reaches one of them, and in which somebody reads the linked output's gradient (a hook,
   ``retain_grad``, an input of ``autograd.grad`` or ``backward``), is refused before any of it runs.
3. Outputs beside a loss have no gradient in the step: none may be read that comes through the loss.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ebbtide.capture.output_links import Links
from ebbtide.engine.pending_steps import disturb_step_of
from ebbtide.errors import CaptureError
from ebbtide.torch_seams.autograd import (
    BackwardWatch,
    gradient_edge,
    gradient_hooks,
    is_function_node,
    output_of_node,
    outputs_reached,
)

__all__ = ["forget_all", "watch_detached", "watch_links"]


class _Read:
    """An output whose gradient user code may read, though a planned step has a part of it, or nothing.

    Args:
        tensor: the output. It is not held, nor are its hooks, which live as long as autograd's graph does.
        others: positions of the outputs through which the rest of its gradient comes; ``None``: any.
    """

    __slots__ = ("_hooks", "_tensor", "others")

    def __init__(self, tensor: torch.Tensor, others: frozenset[int] | None) -> None:
        self._tensor, self._hooks, self.others = weakref.ref(tensor), weakref.ref(gradient_hooks(tensor)), others

    def asked_for(self, inputs: Sequence[Any]) -> str:
        """How its gradient is read in a backward with these ``inputs``; empty if it is not."""
        tensor = self._tensor()
        if self._hooks():
            return "register_hook"
        if tensor is None:
            return ""
        if any(each is tensor for each in inputs):
            return _AS_INPUT
        return "retain_grad" if tensor.retains_grad else ""


_AS_INPUT = "an input of autograd.grad"


@dataclass(frozen=True, eq=False, slots=True)
class _Watched:
    """The outputs of one forward whose gradients are not to be read, and its node."""

    node: weakref.ref[Any]
    reads: tuple[_Read, ...]
    links: Links

    def asked_for(self, inputs: Sequence[Any]) -> Iterator[tuple[frozenset[int] | None, str]]:
        """Through which other outputs, and how, for those whose gradients are read in a backward with ``inputs``."""
        for each in self.reads:
            if how := each.asked_for(inputs):
                yield each.others, how
        node = self.node()
        for each in inputs:
            below, position = gradient_edge(each)
            if below is not None and below is node and position in self.links:
                yield self.links[position], _AS_INPUT


_numbers = itertools.count()
_watched: dict[int, _Watched] = {}  # as long as the node lives


def watch_links(results: Sequence[Any], links: Links) -> None:
    """A step with ``links`` has given ``results``: all its outputs, those too that the model keeps for itself."""
    tensors = [each for each in results if isinstance(each, torch.Tensor) and each.grad_fn is not None]
    node = next((each.grad_fn for each in tensors if is_function_node(each.grad_fn)), None)
    if node is not None:
        positions = [(each, output_of_node(each, node)) for each in tensors]
        _begin(node, tuple(_Read(each, links[i]) for each, i in positions if i is not None and i in links), links)


def watch_detached(node: Any, outputs: Sequence[torch.Tensor]) -> None:
    """The step of ``node`` has returned ``outputs`` beside its loss, which have no gradient in it at all."""
    if node is not None and outputs:
        _begin(node, tuple(_Read(each, None) for each in outputs), {})


def _begin(node: Any, reads: tuple[_Read, ...], links: Links) -> None:
    number = next(_numbers)
    _watched[number] = _Watched(weakref.ref(node), reads, links)
    weakref.finalize(node, _forget, number).atexit = False
    if not _watch.is_open:
        _watch.open()


def forget_all() -> None:
    """Watch none of the steps any more that there are."""
    _watched.clear()
    _watch.close()


def _forget(number: int) -> None:
    """The node of a step is gone."""
    _watched.pop(number, None)
    if not _watched:
        _watch.close()


def _refuse_partial_gradients(roots: Sequence[Any], inputs: Sequence[Any]) -> None:
    """A backward is about to begin at ``roots`` (definition 2).

    Raises:
        CaptureError: if it would give a linked output a part of its gradient.
    """
    for watched in list(_watched.values()):
        asked = list(watched.asked_for(inputs))
        node = watched.node()
        reached = outputs_reached(roots, node) if asked else frozenset[int]()
        for others, how in asked:
            if reached if others is None else not reached.isdisjoint(others):
                disturb_step_of(node)
                raise CaptureError(
                    f"the gradient of an output is read ({how}), and other outputs of the same forward are computed "
                    "from it: a planned step has no gradient that comes through those. No gradient was handed out",
                    remedy="fit the submodules before and after that output, each by itself, in bytes that hold "
                    "both (ebbtide.fit(model.encoder, '8GiB')), take the gradient inside of the forward, or call the "
                    "plain model (ebbtide.unfit(model))",
                )


_watch = BackwardWatch(begins=_refuse_partial_gradients)
