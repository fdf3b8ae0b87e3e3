"""Outputs that other outputs are computed from: a planned step has no gradient of theirs as eager has it.

1. A step is one node of autograd's graph. An output is *linked* to the others of its forward that gradients come
   through on their way to it.
2. Eager's gradient of a linked output has what comes through those others too, a planned step's only what comes from
   outside. So a backward that reaches one of them, and in which somebody reads the linked output's gradient (a hook,
   ``retain_grad``, an input of ``autograd.grad`` or ``backward``), is refused before any of it runs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.errors import CaptureError
from ebbtide.torch_seams.autograd import (
    BackwardWatch,
    gradient_edge,
    has_gradient_hooks,
    output_of_node,
    outputs_reached,
)

__all__ = ["Links", "links_of", "watch_links"]

Links = Mapping[int, frozenset[int]]
"""Of every linked output its position among the node's outputs, and the positions of those that it is linked to."""


def links_of(captured: Captured) -> Links:
    """The linked outputs of a step (definition 1)."""
    outputs = captured.outputs[: captured.forward_output_count]
    positions = [i for i, each in enumerate(outputs) if isinstance(each, fx.Node) and _takes_gradients(each)]
    if len(positions) < 2:
        return {}
    reaches: dict[fx.Node, int] = {}  # of a node, as bits, the outputs that it takes part in
    own: dict[fx.Node, int] = {}
    for position in positions:
        own[outputs[position]] = own.get(outputs[position], 0) | 1 << position
    for node in reversed(captured.graph.nodes):
        found = own.get(node, 0)
        for reader in node.users:
            found |= reaches.get(reader, 0)
        if found and _takes_gradients(node):
            reaches[node] = found
    links = {i: reaches.get(outputs[i], 0) & ~(1 << i) for i in positions}
    return {i: frozenset(j for j in positions if bits >> j & 1) for i, bits in links.items() if bits}


def _takes_gradients(node: fx.Node) -> bool:
    """Whether a gradient comes through ``node``, as far as its kind says."""
    value = node.meta.get("val")
    values: Sequence[object] = value if isinstance(value, list | tuple) else [value]
    if node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_copy.default):
        return False
    return any(isinstance(each, torch.Tensor) and (each.is_floating_point() or each.is_complex()) for each in values)


@dataclass(frozen=True, eq=False, slots=True)
class _Watched:
    """The linked outputs of one forward, as user code has them: themselves, or views of them."""

    links: Links
    returned: tuple[tuple[weakref.ref[torch.Tensor], int], ...]

    def asked_for(self, node: Any, inputs: Sequence[Any]) -> Iterator[tuple[int, str]]:
        """Which linked outputs have their gradients read in a backward with these ``inputs``, and how."""
        for reference, position in self.returned:
            tensor = reference()
            if tensor is None:
                continue
            if tensor.retains_grad:
                yield position, "retain_grad"
            if has_gradient_hooks(tensor):
                yield position, "register_hook"
            if any(each is tensor for each in inputs):
                yield position, "an input of autograd.grad"
        for each in inputs:
            below, position = gradient_edge(each)
            if below is node and position in self.links:
                yield position, "an input of autograd.grad"


_numbers = itertools.count()
_watched: dict[int, tuple[weakref.ref[Any], _Watched]] = {}  # with the node of the step, as long as that lives


def watch_links(node: Any, outputs: Sequence[torch.Tensor], links: Links) -> None:
    """The forward of a step with ``links`` has returned ``outputs``, which hang on ``node``."""
    if not links:
        return
    number, positions = next(_numbers), [(each, output_of_node(each, node)) for each in outputs]
    returned = tuple((weakref.ref(each), i) for each, i in positions if i is not None and i in links)
    _watched[number] = weakref.ref(node), _Watched(links, returned)
    weakref.finalize(node, _forget, number).atexit = False
    if not _watch.is_open:
        _watch.open()


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
    for reference, watched in list(_watched.values()):
        node = reference()
        asked = [] if node is None else list(watched.asked_for(node, inputs))
        reached = outputs_reached(roots, node) if asked else frozenset[int]()
        for position, how in asked:
            if not reached.isdisjoint(watched.links[position]):
                raise CaptureError(
                    f"the gradient of an output is read ({how}), and other outputs of the same forward are computed "
                    "from it: a planned step has no gradient that comes through those. No gradient was handed out",
                    remedy="fit the submodules before and after that output, each by itself "
                    "(ebbtide.fit(model.encoder, ...)), take the gradient inside of the forward, or call the plain "
                    "model (ebbtide.unfit(model))",
                )


_watch = BackwardWatch(begins=_refuse_partial_gradients)
