"""Where calls in slices go in a joint graph, and how they are put there: each in the place of its parts."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import fx

from ebbtide.capture.joint import Captured, reread
from ebbtide.rewrites.rewrite_proof import PARTS
from ebbtide.rewrites.sliced.calls import SlicedCall
from ebbtide.rewrites.views import SAME_ORDER
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["has_places", "with_calls"]

_aten = torch.ops.aten
_VIEWS = SAME_ORDER | {_aten.t.default, _aten.transpose.int, _aten.expand.default}


def with_calls(step: Captured, calls: Iterable[tuple[SlicedCall, int]]) -> Captured:
    """``step`` with ``calls``, each with the size of its slices, in the places of their parts."""
    graph = fx.Graph(owning_module=step.graph.owning_module)
    nodes: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(step.graph, nodes)
    graph.output(tuple(tree_leaves(results))).meta = dict(step.graph.output_node().meta)
    writer = _Writer(step, nodes)
    for call, size in calls:
        writer.write(call, size)
    writer.erase()
    graph.lint()
    return reread(step, graph)


def has_places(step: Captured, calls: Iterable[SlicedCall]) -> bool:
    """Whether there is a place for each of ``calls``: after all that it reads, before all that reads its results."""
    order = {node: index for index, node in enumerate(step.graph.nodes)}
    ops = frozenset(step.op_nodes)
    return all(_place_of(call, order, ops) is not None for call in calls)


def _place_of(call: SlicedCall, order: Mapping[fx.Node, int], ops: frozenset[fx.Node]) -> fx.Node | None:
    """Before this node of the captured graph ``call`` goes; ``None`` where some reader comes too early."""
    latest = max((order[each] for given in call.inputs for each in _makers(given, ops)), default=-1)
    first = min(call.results, key=order.__getitem__)
    if latest < order[first]:
        return first
    if any(order[user] < latest for each in call.results for user in each.users):
        return None
    return next(node for node, index in order.items() if index > latest)


def _makers(node: fx.Node, ops: frozenset[fx.Node]) -> Iterator[fx.Node]:
    """The ops and inputs of the step that ``node`` is a view of, and those that this view depends on."""
    if node in ops or not node.all_input_nodes:
        yield node
    else:
        for each in node.all_input_nodes:
            yield from _makers(each, ops)


class _Writer:
    """Puts calls into a copy of the joint graph.

    Args:
        step: whose graph it is.
        nodes: from the step's nodes to the copy's.
    """

    def __init__(self, step: Captured, nodes: dict[fx.Node, fx.Node]) -> None:
        self.nodes = nodes
        self.order = {node: index for index, node in enumerate(step.graph.nodes)}
        self.ops = frozenset(step.op_nodes)
        self.replaced: set[fx.Node] = set()

    def write(self, call: SlicedCall, size: int) -> None:
        """One call in the place of its parts."""
        place = _place_of(call, self.order, self.ops)
        assert place is not None
        for each in call.inputs:
            self._hoist(each, place)
        graph = self.nodes[place].graph
        args = (size, *(self.nodes[each] for each in call.inputs))
        with graph.inserting_before(self.nodes[place]):
            node = graph.create_node("call_function", call.target, args, name=call.name)
        node.meta = dict(call.results[0].meta)
        node.meta["val"] = tuple(each.meta["val"] for each in call.results)
        node.meta[PARTS] = tuple(each.name for each in call.parts)
        for index, result in reversed([*enumerate(call.results)]):
            with graph.inserting_after(node):
                made = graph.call_function(operator.getitem, (node, index))
            made.meta = dict(result.meta)
            self.nodes[result].replace_all_uses_with(made)
        self.replaced.update(call.parts)

    def _hoist(self, node: fx.Node, place: fx.Node) -> None:
        """Views that come after ``place`` and are read by its call go before it."""
        if self.order[node] < self.order[place]:
            return
        assert node not in self.ops
        for each in node.all_input_nodes:
            self._hoist(each, place)
        self.nodes[place].prepend(self.nodes[node])

    def erase(self) -> None:
        """What nobody reads any more, views included."""
        for node in reversed(self.order):
            mine = self.nodes.get(node)
            if mine is not None and not mine.users and (node.target in _VIEWS or node in self.replaced):
                mine.graph.erase_node(mine)
