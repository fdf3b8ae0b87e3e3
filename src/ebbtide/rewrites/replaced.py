"""What an op of a rewritten step stands for: a part of the step as it was, which can be run beside it and compared.

1. An op of a rewrite is *given* values of the step as it was, and gives others of them, its *results*. The *part* it
   stands for is what lies between the two: calls of that step, as it had them.
2. A part can be run where all that it reads is given, or is another view of what is given, and where nothing in it
   draws random numbers or has an effect.
3. Running it takes memory beside what is given: each storage that it makes, until its last reader, and the workspace
   of each call. A result is fingerprinted when it is made, and dropped.
4. Where that is more than there is, a *sample* may do: some of the part, from the numbers that are there, such as the
   one op whose result the rewrite makes in slices, whole, with each slice held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ebbtide.capture.joint import Captured, tensors_of
from ebbtide.capture.traits import draws_random, has_effect
from ebbtide.cost.call import Call
from ebbtide.torch_seams.graphs import arguments_of
from ebbtide.torch_seams.storages import storage_key

__all__ = ["Part", "Replaced", "Sample", "part_of", "replaced_by"]


@dataclass(frozen=True)
class Sample:
    """Some of a part, compared where there is no room for all (definition 4).

    Attributes:
        says: what is compared, in words.
        bytes: that it takes beside what is given.
        holds: whether it is the same, from the arguments of the op. What the op has to give is given to the second
            argument, with its position among the op's results.
    """

    says: str
    bytes: int
    holds: Callable[[Sequence[Any], Callable[[int, Tensor], None]], bool]


@dataclass(frozen=True)
class Replaced:
    """What an op of a rewrite stands for (definition 1).

    Attributes:
        name: of the op, in the rewritten step.
        inputs: by the position of an argument, the node of the step as it was whose value it has.
        results: the same by the position of a result, 0 where there is one alone.
        step: as it was.
        sample: of it; ``None`` if there is none.
    """

    name: str
    inputs: Mapping[int, fx.Node]
    results: Mapping[int, fx.Node]
    step: Captured
    sample: Sample | None = None


@dataclass(frozen=True)
class Part:
    """A part that can be run (definitions 2 and 3).

    Attributes:
        graph: takes what is given, in the order of :attr:`Replaced.given`, and returns nothing.
        bytes: that running it takes, beside what is given.
    """

    graph: fx.GraphModule
    bytes: int


def replaced_by(
    node: fx.Node, claims: Mapping[fx.Node, Any], results: Iterable[Any], step: Captured, sample: Sample | None = None
) -> Replaced | None:
    """What ``node`` stands for, by a proof's claims; ``None`` where none of its results is a value of ``step``.

    Args:
        node: of the rewritten step, its arguments by position.
        claims: of the nodes that it reads: a node of ``step``, or a node and the position of one of its results.
            What is anything else is no value of ``step``.
        results: the claims of its results, in order.
        step: as it was.
        sample: of it.
    """
    args = [claims.get(each) if isinstance(each, fx.Node) else None for each in arguments_of(node)]
    given = {position: found for position, each in enumerate(args) if (found := _node_of(each)) is not None}
    made = tensors_of(node.meta["val"])
    gives = {
        position: found
        for position, each in enumerate(results)
        if (found := _node_of(each)) is not None and _comparable(made[position], found.meta["val"])
    }
    return Replaced(node.name, given, gives, step, sample) if gives else None


def _node_of(claim: Any) -> fx.Node | None:
    if isinstance(claim, tuple) and len(claim) == 2:
        source, index = claim
        users = source.users if isinstance(source, fx.Node) else ()
        claim = next((each for each in users if arguments_of(each)[1:] == (index,) and _is_element(each)), None)
    return claim if isinstance(claim, fx.Node) and isinstance(claim.meta.get("val"), Tensor) else None


def _is_element(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _comparable(mine: Tensor | None, theirs: Tensor) -> bool:
    """Whether the same numbers are the same bytes in the order in which they lie in memory."""
    if mine is None or mine.dtype != theirs.dtype or mine.numel() != theirs.numel():
        return False
    if mine.is_contiguous() and theirs.is_contiguous():
        return True
    return mine.shape == theirs.shape and mine.stride() == theirs.stride() and _dense(mine)


def _dense(tensor: Tensor) -> bool:
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).is_contiguous()


def part_of(
    replaced: Replaced, take: Callable[[int, Tensor], None], workspace: Callable[[Call], int | None]
) -> Part | None:
    """The part that ``replaced`` stands for; ``None`` where it cannot be run, or nobody knows what that takes.

    Args:
        replaced: by an op.
        take: called with each result, by its position, when it has been made.
        workspace: of a call, bytes; ``None`` where it is not known.
    """
    writer = _Writer(replaced, workspace)
    try:
        return writer.written(take)
    except _Unable:
        return None


class _Unable(Exception):
    """The part cannot be run by itself (definition 2), or a workspace is not known."""


class _Writer:
    def __init__(self, replaced: Replaced, workspace: Callable[[Call], int | None]) -> None:
        self.replaced, self.step = replaced, replaced.step
        self.workspace = workspace
        self.places = {node: index for index, node in enumerate(self.step.op_nodes)}
        self.inputs = dict.fromkeys(replaced.inputs.values())
        self.shared = {storage_key(each.meta["val"]): each for each in self.inputs}

    def written(self, take: Callable[[int, Tensor], None]) -> Part:
        needed = self._needed()
        order = [each for each in self.step.graph.nodes if each in needed]
        graph = fx.Graph()
        values = {each: graph.placeholder(f"given_{index}") for index, each in enumerate(self.replaced.inputs.values())}
        wanted: dict[fx.Node, list[int]] = {}
        for position, each in self.replaced.results.items():
            wanted.setdefault(each, []).append(position)
        for each in [*self.inputs, *order]:
            if each not in values:
                values[each] = self._call(graph, each, values)
            for position in wanted.get(each, ()):
                graph.call_function(take, (position, values[each]))
        graph.output(None)
        constants = torch.nn.Module()
        for each in graph.find_nodes(op="get_attr"):
            setattr(constants, each.target, getattr(self.step.graph.owning_module, each.target))
        return Part(fx.GraphModule(constants, graph), self._bytes(order))

    def _needed(self) -> set[fx.Node]:
        """What has to be called: all behind the results, up to what is given."""
        needed: set[fx.Node] = set()
        pending = [each for each in self.replaced.results.values() if each not in self.inputs]
        while pending:
            node = pending.pop()
            if node in needed or node in self.inputs:
                continue
            needed.add(node)
            if node.op == "get_attr" or self._seen(node) is not None:
                continue
            if node.op != "call_function" or draws_random(node) or has_effect(node):
                raise _Unable
            pending += node.all_input_nodes
        return needed

    def _seen(self, node: fx.Node) -> fx.Node | None:
        """What is given in the same storage, if it is laid out in the same elements."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.is_conj() or value.is_neg():
            return None
        found = self.shared.get(storage_key(value))
        return found if found is not None and found.meta["val"].dtype == value.dtype else None

    def _call(self, graph: fx.Graph, node: fx.Node, values: Mapping[fx.Node, fx.Node]) -> fx.Node:
        if node.op == "get_attr":
            return graph.get_attr(str(node.target))
        if (source := self._seen(node)) is not None:
            value, had = node.meta["val"], source.meta["val"]
            shift = value.storage_offset() - had.storage_offset()
            return graph.call_function(_seen_as, (values[source], list(value.shape), list(value.stride()), shift))
        return graph.node_copy(node, values.__getitem__)

    def _bytes(self, order: Sequence[fx.Node]) -> int:
        """Bytes that running it takes (definition 3)."""
        last: dict[int, fx.Node] = {}
        for node in order:
            for each in (node, *node.all_input_nodes):
                last |= {key: node for key in _storages(each)}
        live: dict[int, int] = {}
        most = 0
        for node in order:
            if node.op == "get_attr" or self._seen(node) is not None:
                continue
            new = {key: size for key, size in _storages(node).items() if key not in live and key not in self.shared}
            unit = self.step.granularity_bytes
            live |= {key: -(-size // unit) * unit for key, size in new.items()}
            most = max(most, sum(live.values()) + self._workspace(node))
            live = {key: size for key, size in live.items() if last[key] is not node}
        return most

    def _workspace(self, node: fx.Node) -> int:
        if (place := self.places.get(node)) is None:
            return 0
        found = self.workspace(self.step.calls[place])
        if found is None:
            raise _Unable
        return found


def _storages(node: fx.Node) -> dict[int, int]:
    found = [each for each in tensors_of(node.meta.get("val")) if each is not None]
    return {storage_key(each): each.untyped_storage().nbytes() for each in found}


def _seen_as(tensor: Tensor, size: list[int], stride: list[int], shift: int) -> Tensor:
    return tensor.as_strided(size, stride, int(tensor.storage_offset()) + shift)
