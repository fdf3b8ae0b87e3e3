"""A captured step that finds out about all gradients before it applies any, as a captured step.

1. A *partial norm* is an op that runs once, right behind a gradient, and makes one number of it.
2. The *total norm* is an op that runs once, reads all partial norms, and gives what every gradient is scaled by.
   Updates read it, so none comes before it (``optimizer.in_step.updates``).
3. An update scales its gradient in place, so nobody else may read that one: of a gradient that others read it takes a
   copy, which is made where the gradient is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ebbtide.capture.joint import Captured, reread
from ebbtide.cost.priced import Priced
from ebbtide.optimizer.in_step.updater import current_updater
from ebbtide.torch_seams.fake_tensors import mode_of
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["PartialNorm", "TotalNorm", "own_copy", "total_norm_of", "with_norms"]


@dataclass(frozen=True)
class PartialNorm(Priced):
    """The target of a partial norm. Its arguments are the gradient and two numbers of bytes (``cost.priced``).

    Attributes:
        position: of the parameter among the primals.
        parameter: its name.
    """

    position: int
    parameter: str

    @property
    def __name__(self) -> str:
        """What generated code calls it."""
        return f"partial_norm_{self.position}"

    def __str__(self) -> str:
        return "ebbtide.partial_norm"

    def __call__(self, gradient: torch.Tensor, workspace_bytes: int, traffic_bytes: int) -> torch.Tensor:
        """Let the updater that is current take it."""
        return current_updater().partial_norm(self.position, gradient)


@dataclass(frozen=True)
class TotalNorm(Priced):
    """The target of the total norm. Its arguments are all partial norms and two numbers of bytes.

    Attributes:
        positions: of the parameters, in the order of the partial norms.
    """

    positions: tuple[int, ...]

    __name__ = "total_norm"

    def __str__(self) -> str:
        return "ebbtide.total_norm"

    def __call__(self, *arguments: torch.Tensor | int) -> torch.Tensor:
        """Let the updater that is current take it."""
        norms = [each for each in arguments if isinstance(each, torch.Tensor)]
        return current_updater().total_norm(dict(zip(self.positions, norms, strict=True)))


def total_norm_of(captured: Captured) -> fx.Node | None:
    """The total norm of a step; ``None`` where gradients are applied as they come."""
    return next((node for node in captured.op_nodes if isinstance(node.target, TotalNorm)), None)


def own_copy(captured: Captured, original: fx.Node, gradient: fx.Node) -> fx.Node:
    """``gradient``, or a copy of it right behind it where others read it.

    Args:
        captured: whose gradient it is.
        original: it in ``captured``.
        gradient: it in a copy of the graph, to which the copy is added.
    """
    buffer = captured.buffer_of[original]
    if buffer is None or not captured.program.readers[buffer]:
        return gradient
    with gradient.graph.inserting_after(gradient):
        copy = gradient.graph.call_function(torch.ops.aten.clone.default, (gradient,))
    copy.meta = dict(gradient.meta)
    with mode_of(gradient.meta["val"]), torch.no_grad():
        copy.meta["val"] = gradient.meta["val"].clone()
    return copy


def with_norms(
    captured: Captured, norms: Mapping[PartialNorm, tuple[int, int]], total_costs: tuple[int, int]
) -> Captured:
    """``captured`` with ``norms`` of gradients and their total.

    Args:
        captured: left as it is.
        norms: one or more, with the bytes that each takes and moves.
        total_costs: likewise, of the total norm.
    """
    graph = fx.Graph(owning_module=captured.graph.owning_module)
    nodes: dict[fx.Node, fx.Node] = {}
    results = list(tree_leaves(graph.graph_copy(captured.graph, nodes)))
    count = captured.forward_output_count
    place = {node: index for index, node in enumerate(captured.graph.nodes)}
    in_order = sorted(norms, key=lambda each: place[captured.outputs[count + each.position]])
    partials: list[fx.Node] = []
    for norm in in_order:
        original = captured.outputs[count + norm.position]
        gradient = nodes[original]
        name = norm.parameter.replace(".", "_")
        gradient = results[count + norm.position] = own_copy(captured, original, gradient)  # definition 3
        with graph.inserting_after(gradient):
            node = graph.create_node("call_function", norm, (gradient, *norms[norm]), name=f"partial_norm_{name}")
        _describe(node, gradient)
        partials.append(node)
    with graph.inserting_after(partials[-1]):
        positions = tuple(each.position for each in in_order)
        total = graph.create_node("call_function", TotalNorm(positions), (*partials, *total_costs), name="total_norm")
    _describe(total, partials[-1])
    graph.output(tuple(results)).meta = dict(captured.graph.output_node().meta)
    return reread(captured, graph)


def _describe(node: fx.Node, like: fx.Node) -> None:
    """``node`` makes one number of what ``like`` is."""
    node.meta = dict(like.meta)
    with mode_of(like.meta["val"]):
        node.meta["val"] = like.meta["val"].new_empty(())
