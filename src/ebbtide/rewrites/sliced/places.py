"""Where calls in slices go in a joint graph, and how they are put there: each in the place of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.rewrites.graphs import ChangedGraph
from ebbtide.rewrites.sliced.calls import SlicedCall

__all__ = ["has_places", "with_calls"]


def with_calls(step: Captured, calls: Iterable[tuple[SlicedCall, int]]) -> Captured:
    """``step`` with ``calls``, each with the size of its slices, in the places of their parts."""
    changed, ops = ChangedGraph(step), frozenset(step.op_nodes)
    for call, size in calls:
        _write(changed, call, size, ops)
    return changed.captured()


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


def _write(changed: ChangedGraph, call: SlicedCall, size: int, ops: frozenset[fx.Node]) -> None:
    """Put one call in the place of its parts."""
    graph, nodes = changed.graph, changed.nodes
    place = _place_of(call, changed.order, ops)
    assert place is not None
    for each in call.inputs:
        changed.hoist(each, place)
    with graph.inserting_before(nodes[place]):
        args = (size, *(nodes[each] for each in call.inputs))
        node = graph.create_node("call_function", call.target, args, name=call.name)
    values = tuple(each.meta["val"] for each in call.results)
    node.meta = {**call.results[0].meta, "val": values}
    for index, result in reversed([*enumerate(call.results)]):
        nodes[result].replace_all_uses_with(changed.element(node, index, result.meta))
