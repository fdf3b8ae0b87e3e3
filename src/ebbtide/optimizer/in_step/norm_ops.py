"""A captured step that finds out about all gradients before it applies any, as a captured step.

1. A *look* is an op that runs once, right behind a gradient, and makes one number of it: its norm.
2. The *settlement* is an op that runs once, reads all looks, and gives the number that every gradient is scaled by.
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
    """The target of a look. Its arguments are the gradient and two numbers of bytes (``cost.priced``).

    Attributes:
        position: of the parameter among the primals.
        parameter: its name.
    """

    position: int
    parameter: str

    @property
    def __name__(self) -> str:
        """What generated code calls it."""
        return f"look_{self.position}"

    def __str__(self) -> str:
        return "ebbtide.look"

    def __call__(self, gradient: torch.Tensor, workspace_bytes: int, traffic_bytes: int) -> torch.Tensor:
        """Let the updater that is current look."""
        return current_updater().look(self.position, gradient)


@dataclass(frozen=True)
class TotalNorm(Priced):
    """The target of the settlement. Its arguments are all looks and two numbers of bytes.

    Attributes:
        positions: of the parameters that were looked at, in the order of the looks.
    """

    positions: tuple[int, ...]

    __name__ = "settle"

    def __str__(self) -> str:
        return "ebbtide.settle"

    def __call__(self, *arguments: torch.Tensor | int) -> torch.Tensor:
        """Let the updater that is current settle."""
        looks = [each for each in arguments if isinstance(each, torch.Tensor)]
        return current_updater().settle(dict(zip(self.positions, looks, strict=True)))


def total_norm_of(captured: Captured) -> fx.Node | None:
    """The settlement of a step; ``None`` where gradients are applied as they come."""
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


def with_norms(captured: Captured, looks: Mapping[PartialNorm, tuple[int, int]], settling: tuple[int, int]) -> Captured:
    """``captured`` with ``looks`` at gradients and their settlement.

    Args:
        captured: left as it is.
        looks: one or more, with the bytes that each takes and moves.
        settling: likewise, of the settlement.
    """
    graph = fx.Graph(owning_module=captured.graph.owning_module)
    nodes: dict[fx.Node, fx.Node] = {}
    results = list(tree_leaves(graph.graph_copy(captured.graph, nodes)))
    count = captured.forward_output_count
    place = {node: index for index, node in enumerate(captured.graph.nodes)}
    in_order = sorted(looks, key=lambda each: place[captured.outputs[count + each.position]])
    made: list[fx.Node] = []
    for look in in_order:
        original = captured.outputs[count + look.position]
        gradient = nodes[original]
        name = look.parameter.replace(".", "_")
        gradient = results[count + look.position] = own_copy(captured, original, gradient)  # definition 3
        with graph.inserting_after(gradient):
            node = graph.create_node("call_function", look, (gradient, *looks[look]), name=f"look_{name}")
        _describe(node, gradient)
        made.append(node)
    with graph.inserting_after(made[-1]):
        positions = tuple(each.position for each in in_order)
        settle = graph.create_node("call_function", TotalNorm(positions), (*made, *settling), name="settle")
    _describe(settle, made[-1])
    graph.output(tuple(results)).meta = dict(captured.graph.output_node().meta)
    return reread(captured, graph)


def _describe(node: fx.Node, like: fx.Node) -> None:
    """``node`` makes one number of what ``like`` is."""
    node.meta = dict(like.meta)
    with mode_of(like.meta["val"]):
        node.meta["val"] = like.meta["val"].new_empty(())
