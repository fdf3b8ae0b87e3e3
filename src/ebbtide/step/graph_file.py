"""Programs from published graph files: networkx node-link JSON, in the two dialects that papers have left behind.

Definitions:
1. A node is one op with one output buffer; an edge says that its target reads its source's buffer. Parallel edges
   are one read. Every node runs at least once.
2. Networks (Checkmate's) name a node by ``id`` and give ``cost_cpu``, ``cost_ram`` and ``backward``; random layered
   graphs name it by ``name`` and give ``duration`` and ``out_cost``. Edges are under ``links`` or ``edges``, their
   ends under ``source`` and ``target`` or, where a graph was written with other key names, ``0`` and ``1``.
3. Ops come in the file's order as far as edges allow: always the first node whose inputs are done, by the graph's own
   attribute ``order`` (node names, as random layered graphs have it and Moccasin runs them) or else by place in the
   file. Nodes that ``order`` leaves out come last.
4. The last op's output is needed at the end. The boundary is the first op that is flagged as backward; without
   flags it is 0, so that every op may run anywhere.
5. Seconds are the file's costs, in the profile's own unit: only their ratios mean something.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ebbtide.errors import UsageError
from ebbtide.step.program import Buffer, Op, Program

__all__ = ["program_from_graph"]

_FORM = "a graph file is networkx node-link JSON: an object with lists 'nodes' and 'links' (or 'edges')"
_SECONDS_KEYS = ("cost_cpu", "duration")
_BYTES_KEYS = ("cost_ram", "out_cost")


@dataclass(frozen=True, slots=True)
class _Node:
    """One node as read: definition 2."""

    key: str
    name: str
    seconds: float
    bytes: int
    backward: bool


def program_from_graph(data: Mapping[str, Any], *, name: str | None = None) -> Program:
    """The program of a published graph.

    Args:
        data: what :func:`json.load` gives for the file.
        name: of the program; the graph's own name if ``None``.

    Raises:
        UsageError: if ``data`` is not such a graph, naming the node or edge and the reason.
    """
    nodes = _nodes(data)
    reads = _reads(data, nodes)
    order = _topological_order(nodes, reads, _ranks(data, nodes))
    place = {index: position for position, index in enumerate(order)}
    ops = tuple(
        Op(
            name=nodes[index].name,
            target="graph.node",
            inputs=tuple(sorted(place[source] for source in reads[index])),
            outputs=(place[index],),
            seconds=nodes[index].seconds,
        )
        for index in order
    )
    buffers = tuple(Buffer(nodes[index].name, nodes[index].bytes, place[index]) for index in order)
    return Program(
        name=name if name is not None else _graph_name(data),
        ops=ops,
        buffers=buffers,
        boundary=next((place[index] for index in order if nodes[index].backward), 0),
        gradients=(len(ops) - 1,),
    )


def _graph_name(data: Mapping[str, Any]) -> str:
    """The name that networkx keeps in the graph's own attributes."""
    attributes = data.get("graph")
    if isinstance(attributes, Mapping):
        return str(cast("Mapping[str, Any]", attributes).get("name", "graph"))
    return "graph"


def _rows(data: Mapping[str, Any], *keys: str) -> Sequence[Mapping[str, Any]]:
    """The list of objects under the first of ``keys`` that is there."""
    if not isinstance(data, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - JSON may be anything
        raise UsageError(f"a graph is not a {type(data).__name__}; {_FORM}")
    for key in keys:
        rows: Any = data.get(key)
        if isinstance(rows, list):
            for position, row in enumerate(cast("list[Any]", rows)):
                if not isinstance(row, dict):
                    raise UsageError(f"entry {position} of {key!r} is {row!r}, which is not a JSON object; {_FORM}")
            return cast("list[Mapping[str, Any]]", rows)
    raise UsageError(f"the graph has no list {' or '.join(map(repr, keys))}; {_FORM}")


def _number(row: Mapping[str, Any], keys: Sequence[str], node: str) -> float:
    """The number under the first of ``keys`` that ``row`` has; finite and not negative."""
    key = next((key for key in keys if key in row), None)
    if key is None:
        raise UsageError(f"node {node} has neither {' nor '.join(map(repr, keys))}")
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise UsageError(f"node {node} has {key} = {value!r}; it must be a finite number, 0 or more")
    return value


def _nodes(data: Mapping[str, Any]) -> list[_Node]:
    """All nodes in the file's order: definition 2."""
    found: list[_Node] = []
    taken: set[str] = set()
    for position, row in enumerate(_rows(data, "nodes")):
        key = row.get("id", row.get("name"))
        if key is None:
            raise UsageError(f"node number {position} has neither 'id' nor 'name'")
        where = repr(key)
        if where in taken:
            raise UsageError(f"node {where} appears twice; nodes need distinct ids")
        taken.add(where)
        found.append(
            _Node(
                key=where,
                name=str(row.get("name", key)),
                seconds=float(_number(row, _SECONDS_KEYS, where)),
                # Rounded up: a size that is too small would let a plan go over its budget.
                bytes=math.ceil(_number(row, _BYTES_KEYS, where)),
                backward=bool(row.get("backward")),
            )
        )
    if not found:
        raise UsageError("the graph has no nodes")
    return found


def _reads(data: Mapping[str, Any], nodes: Sequence[_Node]) -> list[set[int]]:
    """Per node, the nodes whose buffers it reads: definition 1."""
    place = {node.key: index for index, node in enumerate(nodes)}
    reads: list[set[int]] = [set() for _ in nodes]
    for row in _rows(data, "links", "edges"):
        ends: list[int] = []
        for key, other in (("source", "0"), ("target", "1")):
            if key not in row and other not in row:
                raise UsageError(f"edge {dict(row)!r} has no {key!r}; {_FORM}")
            end = repr(row.get(key, row.get(other)))
            if end not in place:
                raise UsageError(f"edge {dict(row)!r} names node {end}, which is not in 'nodes'")
            ends.append(place[end])
        source, target = ends
        if source == target:
            raise UsageError(f"node {nodes[source].key} has an edge to itself; a computation graph has no cycles")
        reads[target].add(source)
    return reads


def _ranks(data: Mapping[str, Any], nodes: Sequence[_Node]) -> list[tuple[int, int]]:
    """Per node what decides between nodes that are ready: definition 3."""
    attributes = data.get("graph")
    found: object = cast("Mapping[str, Any]", attributes).get("order", []) if isinstance(attributes, Mapping) else []
    if not isinstance(found, list):
        raise UsageError(
            "the graph's 'order' is not a list of node names; correct it, or remove it to use the order of the file"
        )
    place = {node.key: index for index, node in enumerate(nodes)}
    ranks = [(len(nodes), index) for index in range(len(nodes))]
    for rank, name in enumerate(cast("list[object]", found)):
        key = repr(name)
        if key not in place:
            raise UsageError(f"the graph's 'order' names node {key}, which is not in 'nodes'")
        if ranks[place[key]][0] < len(nodes):
            raise UsageError(f"the graph's 'order' names node {key} twice")
        ranks[place[key]] = (rank, place[key])
    return ranks


def _topological_order(
    nodes: Sequence[_Node], reads: Sequence[set[int]], ranks: Sequence[tuple[int, int]]
) -> list[int]:
    """Node indices in execution order: definition 3 (Kahn's algorithm with a heap over ranks)."""
    waits = [len(sources) for sources in reads]
    readers: list[list[int]] = [[] for _ in nodes]
    for target, sources in enumerate(reads):
        for source in sources:
            readers[source].append(target)
    ready = [ranks[index] for index, count in enumerate(waits) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for target in readers[index]:
            waits[target] -= 1
            if waits[target] == 0:
                heapq.heappush(ready, ranks[target])
    if len(order) < len(nodes):
        stuck = next(index for index, count in enumerate(waits) if count)
        raise UsageError(f"node {nodes[stuck].key} is on or behind a cycle; a computation graph has no cycles")
    return order
