"""A few ops as one call that makes its results in slices: no value between them is ever whole.

For each slice the call runs its graph on that part of what it is given, and puts each result where it belongs in the
whole one. A region has one call for the results of its forward and one for those of its backward, along each axis; each
makes the large values again that it needs. Inside of a call, large values have as many dimensions as their rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from ebbtide.rewrites.graphs import text_of
from ebbtide.rewrites.once import once
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
from ebbtide.rewrites.sliced.regions import Region, bytes_of
from ebbtide.rewrites.views import made_by, seen
from ebbtide.torch_seams.graphs import arguments_of

__all__ = ["InSlices", "SlicedCall", "calls_of", "moved_arguments", "workspace_of"]


class InSlices:
    """The target of such a call: ``target(size, *tensors)`` returns a tuple.

    Args:
        graph: of one slice: an input for each tensor, and a tuple of outputs.
        axis: along which it is cut.
        inputs: how each tensor is cut.
        outputs: for each output the dimension along which slices of it are put together.
        text: its name, which says all that it does and is the same in every process and for every size.
    """

    borrows = True
    """Nothing that it is given is written to (``cost.profiling_budget``)."""

    def __init__(self, graph: fx.Graph, axis: Axis, inputs: Sequence[Cut], outputs: Sequence[int], text: str) -> None:
        self.__name__ = "in_slices"  # by which generated code calls it
        self.graph, self.axis = graph, axis
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._text = text

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

    @cached_property
    def run(self) -> Callable[..., Any]:
        """The graph, compiled: most calls are looked at, and few are made."""
        return fx.GraphModule(torch.nn.Module(), self.graph).forward

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


@dataclass(frozen=True)
class SlicedCall:
    """One call, and what it takes the place of.

    Attributes:
        results: captured nodes, in order.
        parts: captured ops that it runs, in order, results among them.
        cuts: of each of ``parts``, the dimension of its result that is cut.
        inputs: captured nodes that it reads.
        target: what is called.
    """

    results: tuple[fx.Node, ...]
    parts: tuple[fx.Node, ...]
    cuts: Mapping[fx.Node, int]
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
    last = {made_by(each): index for index, part in enumerate(call.parts) for each in part.all_input_nodes}
    live: dict[fx.Node, int] = {}
    most = 0
    for index, part in enumerate(call.parts):
        live[part] = round(bytes_of(part) * share) + 64
        most = max(most, sum(live.values()))
        for each in [each for each in live if last.get(each, -1) <= index and each not in call.results]:
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


class _Writer:
    """Writes the graph of one slice of some results of a region."""

    def __init__(self, region: Region, axis: Axis, results: tuple[fx.Node, ...]) -> None:
        self.axis, self.results = axis, results
        self.members = frozenset(region.members)
        self.parts = _needed(results, self.members, axis.rank)
        self.cuts = {part: self._cut_of(part) for part in self.parts}
        self.graph = fx.Graph()
        self.inputs: dict[tuple[fx.Node, Cut], fx.Node] = {}
        self.inner: dict[tuple[fx.Node, bool], fx.Node] = {}  # of parts, and whether they are swapped
        self._says: list[str] = []
        self._words: dict[fx.Node, str] = {}

    def written(self) -> SlicedCall:
        """All of it."""
        pairs = list(dict.fromkeys(pair for part in self.parts for pair in self._inputs_of(part)))
        for index, pair in enumerate(pairs):
            self.inputs[pair] = self.graph.placeholder(f"given_{index}")
            self._words[self.inputs[pair]] = f"%{index}"
        for part in self.parts:
            args = [
                self._operand(part, position, each) if isinstance(each, fx.Node) else each
                for position, each in enumerate(arguments_of(part))
            ]
            self.inner[part, False] = self._call(part.target, moved_arguments(part, args), part.kwargs)
        self.graph.output(tuple(self.inner[each, False] for each in self.results))
        given, inputs = zip(*pairs, strict=True)
        outputs = [self.cuts[each] for each in self.results]
        target = InSlices(self.graph, self.axis, inputs, outputs, self._text(inputs))
        return SlicedCall(self.results, self.parts, self.cuts, given, target)

    def _is_inner(self, node: fx.Node) -> bool:
        return seen(node, self.axis.rank)[0] in self.members

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

    def _inputs_of(self, part: fx.Node) -> Iterator[tuple[fx.Node, Cut]]:
        for position, each in enumerate(arguments_of(part)):
            if isinstance(each, fx.Node) and not self._is_inner(each):
                yield each, operand_cut(part, position, self.cuts[part], self.axis.rank)

    def _operand(self, part: fx.Node, position: int, node: fx.Node) -> fx.Node:
        if not self._is_inner(node):
            return self.inputs[node, operand_cut(part, position, self.cuts[part], self.axis.rank)]
        made, swapped = seen(node, self.axis.rank)
        if (made, swapped) not in self.inner:
            last = (self.axis.rank - 2, self.axis.rank - 1)
            self.inner[made, swapped] = self._call(torch.ops.aten.transpose.int, (self.inner[made, False], *last), {})
        return self.inner[made, swapped]

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        node = self.graph.call_function(target, args, dict(kwargs))
        text = text_of(target, args, kwargs, self._words)
        self._words[node] = f"_{len(self._says)}"
        self._says.append(text)
        return node

    def _text(self, inputs: Sequence[Cut]) -> str:
        leading = self.axis.leading if len(self.axis.leading) > 1 else ""
        returned = ", ".join(self._words[self.inner[each, False]] for each in self.results)
        says = f"{leading}; {', '.join(map(str, inputs))}; {'; '.join(self._says)}; {returned}"
        names = ", ".join(str(part.target).split(".")[1] for part in self.parts)
        return f"by_{self.axis.name}[{names}; {hashlib.sha256(says.encode()).hexdigest()[:12]}]"
