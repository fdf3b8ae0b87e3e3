"""What a model has kept of an earlier step with its graph, and what comes back along it.

A codebook, a running estimate or an average that a forward writes without ``detach`` is an input of the next step that
hangs on the node of the last one. In eager no gradient reaches that graph unless the loss reads the estimate. A node
of a captured step passes ``None`` on, and autograd runs what is below it for that: a step whose graph is freed.
1. Such an input is cut off where the graph below it is freed: the step gets the same memory without a graph.
2. A gradient that does arrive for it goes down the graph that was cut off, and autograd says what it says in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from ebbtide.torch_seams.autograd import is_function_node, saved_by
from ebbtide.torch_seams.dynamo import is_argument

__all__ = ["cut_off_freed"]

_MOST_NODES = 64  # of the graph below an input that are looked at: a view, a copy, an average


def cut_off_freed(compiled: Callable[..., Any], graph: fx.Graph) -> Callable[..., Any]:
    """``compiled``, Dynamo's ``graph``, with what the model has kept of freed steps cut off.

    Arguments of the call are left as they are: their graphs are the caller's.
    """
    placeholders = list(graph.find_nodes(op="placeholder"))
    kept = [
        position
        for position, node in enumerate(placeholders)
        if not is_argument(node) and isinstance(value := node.meta.get("example_value"), torch.Tensor)
        if value.requires_grad and not value.is_leaf
    ]
    if not kept:
        return compiled

    def run(*inputs: Any) -> Any:
        cut = list(inputs)
        for position in kept:
            if _is_freed(cut[position].grad_fn):
                cut[position] = _CutOff.apply(torch.zeros(0, requires_grad=True), [cut[position]])
        return compiled(*cut)

    return run


def _is_freed(root: Any) -> bool:
    """Whether a step is below ``root`` whose backward has freed its graph."""
    waiting, seen = [root], set[Any]()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_function_node(node):
            try:
                saved_by(node)
            except RuntimeError:
                return True
        waiting += _below(node)
    return False


def _below(node: Any) -> Iterable[Any]:
    return [below for below, _ in node.next_functions]


class _CutOff(torch.autograd.Function):
    """The tensor without its graph, which takes a gradient because the anchor does."""

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        (ctx.kept,) = kept  # in a list, of which autograd sees no graph
        ctx.set_materialize_grads(False)
        return ctx.kept.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if gradients[0] is not None:
            torch.autograd.backward([ctx.kept], [gradients[0]])
        return None, None
