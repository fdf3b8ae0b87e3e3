"""A few ops as one call that makes its results in slices: no value between them is ever whole.

For each slice the call runs its graph on that part of what it is given, and puts each result where it belongs in the
whole one. A region has one call for the results of its forward and one for those of its backward, along each axis; each
makes the large values again that it needs. Inside of a call, large values have as many dimensions as their rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from ebbtide.rewrites.once import once
from ebbtide.rewrites.reference import ReferenceOp, ReferenceWriter, text_of
from ebbtide.rewrites.sliced.axes import (
    MIXED_DIMENSION,
    Axis,
    Cut,
    is_product,
    mixed_from_the_end,
    operand_cut,
    result_cut,
    swapped_cut,
)
from ebbtide.rewrites.sliced.cuts import cuts_of
from ebbtide.rewrites.sliced.regions import Region, bytes_of
from ebbtide.rewrites.views import made_by, seen, swaps
from ebbtide.torch_seams.graphs import arguments_of

__all__ = ["InSlices", "SlicedCall", "calls_of", "moved_arguments", "workspace_of"]


class InSlices(ReferenceOp):
    """The target of such a call: ``target(size, *tensors)`` returns a tuple.

    Args:
        reference: what it computes.
        axis: along which it is cut.
        inputs: how each tensor is cut.

    Attributes:
        cuts: of all nodes of the reference graph.
        outputs: for each output the dimension along which slices of it are put together.
    """

    def __init__(self, reference: fx.Graph, axis: Axis, inputs: Sequence[Cut]) -> None:
        self.reference, self.axis, self.inputs = reference, axis, tuple(inputs)
        super().__init__("in_slices", reference, self._says())
        self.cuts = cuts_of(reference, axis, inputs)
        cuts = [self.cuts[each] for each in arguments_of(reference.output_node())[0]]
        self.outputs = tuple(cut for cut in cuts if isinstance(cut, int))  # as all are, see ``cuts_of``

    def __call__(self, size: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The results, made in slices of about ``size``."""
        axis, whole = self.axis, list[Tensor]()
        for piece in axis.pieces(size):
            given = [axis.part(each, cut, piece) for each, cut in zip(tensors, self.inputs, strict=True)]
            made = self.run(*given)
            if not whole:
                whole = [
                    part.new_empty((*part.shape[:cut], axis.length, *part.shape[cut + 1 :]))
                    for part, cut in zip(made, self.outputs, strict=True)
                ]
            for index, cut in enumerate(self.outputs):
                axis.part(whole[index], cut, piece).copy_(made[index])
            del given, made  # before the next ones are made
        return tuple(whole)

    @property
    def ops(self) -> list[fx.Node]:
        """The captured ops in its reference graph, which are no views, in order."""
        calls = (each for each in self.reference.nodes if each.op == "call_function")
        return [each for each in calls if swaps(each, self.axis.rank) is None]

    @cached_property
    def run(self) -> Callable[..., Any]:
        """One slice, compiled: most calls are looked at, and few are made."""
        graph, last = fx.Graph(), (self.axis.rank - 2, self.axis.rank - 1)
        inner: dict[fx.Node, fx.Node] = {}
        for node in self.reference.nodes:
            swapped = swaps(node, self.axis.rank) if node.op == "call_function" else None
            if swapped is None:
                inner[node] = made = graph.node_copy(node, inner.__getitem__)
                made.args = moved_arguments(node, made.args)
            elif swapped:
                inner[node] = graph.call_function(torch.ops.aten.transpose.int, (inner[node.all_input_nodes[0]], *last))
            else:
                inner[node] = inner[node.all_input_nodes[0]]
        return fx.GraphModule(torch.nn.Module(), graph).forward

    def _says(self) -> str:
        """A name that says all that it does, and is the same in every process and for every size."""
        calls, returned = text_of(self.reference)
        leading = self.axis.leading if len(self.axis.leading) > 1 else ""
        says = f"{leading}; {', '.join(map(str, self.inputs))}; {'; '.join(calls)}; {returned}"
        names = ", ".join(str(each.target).split(".")[1] for each in self.ops)
        return f"by_{self.axis.name}[{names}; {hashlib.sha256(says.encode()).hexdigest()[:12]}]"


@dataclass(frozen=True)
class SlicedCall:
    """One call, and what it takes the place of.

    Attributes:
        results: captured nodes, in order.
        inputs: captured nodes that it reads.
        target: what is called.
    """

    results: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    target: InSlices

    @property
    def axis(self) -> Axis:
        """Along which it is cut."""
        return self.target.axis

    @property
    def name(self) -> str:
        """The name of its node in a graph."""
        return f"{self.results[0].name}_sliced"


@once
def calls_of(region: Region) -> list[SlicedCall]:
    """The forward's results and the backward's, along each axis: those there are."""
    return [_Writer(region, axis, results).written() for axis, results in region.results]


def moved_arguments(part: fx.Node, args: Sequence[Any]) -> tuple[Any, ...]:
    """``args`` of ``part`` with the dimension that it mixes counted from the last one, whatever comes before."""
    if (mixed := mixed_from_the_end(part)) is None:
        return tuple(args)
    position = MIXED_DIMENSION[part.target]
    named = mixed if isinstance(args[position], int) else [mixed]
    return (*args[:position], named, *args[position + 1 :])


def workspace_of(call: SlicedCall, size: int) -> int:
    """Bytes of the longest slice: all that is there at once between its ops, each dropped after its last reader."""
    share = call.axis.share(size)
    ops, returned = call.target.ops, arguments_of(call.target.reference.output_node())[0]
    last = {made_by(each): index for index, op in enumerate(ops) for each in op.all_input_nodes}
    live: dict[fx.Node, int] = {}
    most = 0
    for index, op in enumerate(ops):
        live[op] = round(bytes_of(op) * share) + 64
        most = max(most, sum(live.values()))
        for each in [each for each in live if last.get(each, -1) <= index and each not in returned]:
            del live[each]
    return most


def _needed(results: Sequence[fx.Node], members: frozenset[fx.Node], rank: int) -> tuple[fx.Node, ...]:
    """The ops that make ``results`` from what is given, in captured order."""
    found: set[fx.Node] = set()
    pending = list(results)
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        if node not in members or not is_product(node):
            pending += [made for made, _ in (seen(each, rank) for each in node.all_input_nodes) if made in members]
    return tuple(node for node in results[0].graph.nodes if node in found)


class _Writer(ReferenceWriter):
    """Writes the reference graph of some results of a region, with an input for each way to cut what is given."""

    def __init__(self, region: Region, axis: Axis, results: tuple[fx.Node, ...]) -> None:
        super().__init__()
        self.axis, self.results = axis, results
        self.members = frozenset(region.members)
        self.parts = _needed(results, self.members, axis.rank)
        self.inputs: dict[tuple[fx.Node, Cut], fx.Node] = {}

    def written(self) -> SlicedCall:
        """All of it."""
        operands = {part: list(self._operands(part)) for part in self.parts}
        for pair in (pair for found in operands.values() for pair in found):
            if isinstance(pair, tuple) and pair not in self.inputs:
                self.inputs[pair] = self.given(pair[0])
        for part in self.parts:
            args = tuple(
                self.inputs[each] if isinstance(each, tuple) else self.copy(each) if isinstance(each, fx.Node) else each
                for each in operands[part]
            )
            self.copies[part] = self.call(part, args, part.kwargs)
        self.graph.output(tuple(self.copies[each] for each in self.results))
        given, inputs = zip(*self.inputs, strict=True)
        return SlicedCall(self.results, given, InSlices(self.graph, self.axis, inputs))

    def _is_inner(self, node: fx.Node) -> bool:
        return seen(node, self.axis.rank)[0] in self.members

    def _operands(self, part: fx.Node) -> Iterator[Any]:
        """Arguments of ``part``, with its cut for each that is given."""
        cut = self._cut_of(part)
        for position, each in enumerate(arguments_of(part)):
            if isinstance(each, fx.Node) and not self._is_inner(each):
                yield each, operand_cut(part, position, cut, self.axis.rank)
            else:
                yield each

    def _cut_of(self, part: fx.Node) -> int:
        """Large values are cut along the axis, and what is made of them follows."""
        if part in self.members:
            return self.axis.dim
        for position, each in enumerate(arguments_of(part)):
            if isinstance(each, fx.Node) and self._is_inner(each):
                swapped = seen(each, self.axis.rank)[1]
                along = swapped_cut(self.axis.dim, self.axis.rank) if swapped else self.axis.dim
                cut = result_cut(part, position, along, self.axis.rank)
                assert cut is not None
                return cut
        raise AssertionError(f"{part.name} reads nothing large")
