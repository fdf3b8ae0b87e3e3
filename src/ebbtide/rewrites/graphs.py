"""What rules write: a changed copy of a step's joint graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from ebbtide.capture.joint import Captured, reread
from ebbtide.torch_seams.aot import is_tangent
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["ChangedGraph", "after_tangents"]


class ChangedGraph:
    """A copy of the joint graph of a step, to be changed.

    Attributes:
        step: as it is.
        graph: the copy.
        nodes: from the step's nodes to the copy's.
        order: of the step's nodes.
    """

    def __init__(self, step: Captured) -> None:
        self.step = step
        self.graph = fx.Graph(owning_module=step.graph.owning_module)
        self.nodes: dict[fx.Node, fx.Node] = {}
        results = self.graph.graph_copy(step.graph, self.nodes)
        self.graph.output(tuple(tree_leaves(results))).meta = dict(step.graph.output_node().meta)
        self.order = {node: index for index, node in enumerate(step.graph.nodes)}
        self._read = [copy for node, copy in self.nodes.items() if node.users and node.op != "placeholder"]
        self._hoisted: set[fx.Node] = set()

    def hoist(self, node: fx.Node, place: fx.Node) -> None:
        """Put ``node`` and what it reads before ``place``, where they come after it."""
        if self.order[node] < self.order[place] or node in self._hoisted:
            return
        for each in node.all_input_nodes:
            self.hoist(each, place)
        self._hoisted.add(node)
        self.nodes[place].prepend(self.nodes[node])

    def element(self, node: fx.Node, index: int, meta: Mapping[str, Any]) -> fx.Node:
        """A result of ``node``, right after it, with a copy of ``meta``."""
        with self.graph.inserting_after(node):
            made = self.graph.call_function(operator.getitem, (node, index))
        made.meta = {**meta, "val": node.meta["val"][index]}
        return made

    def captured(self) -> Captured:
        """The step that it is, without what was read before and is read no more."""
        for each in reversed(self._read):
            if not each.users:
                self.graph.erase_node(each)
        self.graph.lint()
        return reread(self.step, self.graph)


def after_tangents(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes that depend on a tangent, tangents among them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and is_tangent(node)
        if tangent or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(found)
