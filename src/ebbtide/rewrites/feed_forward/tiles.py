"""What of a region is made in slices, along which axis, and the call that does it.

By ``feed_forward.regions``, a region has wide values of N rows and H columns. A *tile* makes some of its narrow
results, and whatever wide values these need, in slices of one axis:
1. By *rows*, wide values are cut along dimension 0. An opening product takes rows of its first operand, and the second
   one whole; a closing product of slices gives rows of its result. Sums over N cannot be made so.
2. By *columns*, wide values are cut along dimension 1. An opening product takes its first operand whole, columns of the
   second one and the bias; a product that sums over N gives rows or columns of its result, whichever H is. Closing
   products cannot be made so: they sum over H.
No sum is taken apart.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from ebbtide.errors import InternalError
from ebbtide.rewrites.feed_forward.regions import PRODUCTS, Region, is_flip, is_sum_of_rows, seen_through
from ebbtide.rewrites.feed_forward.tiled import Tiled
from ebbtide.rewrites.once import once
from ebbtide.rewrites.sliced.calls import SliceWriter, Tile
from ebbtide.rewrites.sliced.elementwise import is_elementwise
from ebbtide.torch_seams.graphs import arguments_of

__all__ = ["COLUMNS", "ROWS", "tiles_of"]

ROWS, COLUMNS = "rows", "columns"


@once
def tiles_of(region: Region) -> list[Tile]:
    """The forward's results by rows, the backward's by rows, the gradients of weights by columns: those there are."""
    early = tuple(each for each in region.closing if each not in region.late)
    late = tuple(each for each in region.closing if each in region.late)
    wanted = ((ROWS, early), (ROWS, late), (COLUMNS, region.weights))
    return [_tile(region, axis, results) for axis, results in wanted if results]


def _tile(region: Region, axis: str, results: tuple[fx.Node, ...]) -> Tile:
    writer = _Writer(region, axis, results)
    given, cuts = writer.written()
    text = writer.text(axis, ", ".join("whole" if cut is None else str(cut) for cut in cuts))
    target = Tiled(writer.graph, cuts, [writer.cut[each] for each in results], text)
    return Tile(axis, results, writer.parts, given, cuts, target)


class _Writer(SliceWriter):
    def __init__(self, region: Region, axis: str, results: tuple[fx.Node, ...]) -> None:
        self.axis = axis
        self.wide = frozenset(region.members)
        super().__init__(results, _needed(results, self.wide))
        self.inner: dict[fx.Node, fx.Node] = {}  # of members, of their transposed views, and of results
        self.cut: dict[fx.Node, int] = {}  # of the same

    def made(self, part: fx.Node) -> fx.Node:
        """The slice of ``part``."""
        return self.inner[part]

    def given(self, part: fx.Node) -> Iterator[tuple[fx.Node, int | None]]:
        """Along which dimension it is cut."""
        arguments = [each for each in arguments_of(part) if isinstance(each, fx.Node)]
        for position, each in enumerate(arguments):
            if not self._is_inner(each):
                yield each, self._cut_of(part, position, len(arguments))

    def _is_inner(self, node: fx.Node) -> bool:
        return seen_through(node) in self.wide or (is_flip(node) and seen_through(arguments_of(node)[0]) in self.wide)

    def _cut_of(self, part: fx.Node, position: int, arguments: int) -> int | None:
        """Definitions 1 and 2, for what is not wide."""
        if part.target not in PRODUCTS or part not in self.wide:  # a number, or the other operand of what sums
            return None
        place = position - arguments  # -2 and -1 are the operands, -3 the bias
        if self.axis == ROWS:
            return 0 if place == -2 else None
        return {-1: 1, -2: None, -3: part_bias_cut(part)}[place]

    def write(self, part: fx.Node) -> None:
        """``part``, and the transposed views that it reads."""
        arguments = [each for each in arguments_of(part) if isinstance(each, fx.Node)]
        places = {each: (position, len(arguments)) for position, each in enumerate(arguments)}

        def inner_of(node: fx.Node) -> fx.Node:
            if not self._is_inner(node):
                return self.inputs[node, self._cut_of(part, *places[node])]
            if not is_flip(node):
                return self.inner[seen_through(node)]
            if node not in self.inner:
                source = self.inner[seen_through(arguments_of(node)[0])]
                self.inner[node] = self.call(torch.ops.aten.t.default, (source,), {})
                self.cut[node] = 1 - self.cut[seen_through(arguments_of(node)[0])]
            return self.inner[node]

        args, kwargs = fx.map_arg((part.args, part.kwargs), inner_of)
        self.inner[part] = self.call(part.target, args, kwargs)
        self.cut[part] = self._result_cut(part)

    def _result_cut(self, part: fx.Node) -> int:
        if self.axis == ROWS:
            return 0
        if part in self.wide or is_sum_of_rows(part):
            return 1
        first = arguments_of(part)[0]
        return 0 if self._is_inner(first) else 1


def part_bias_cut(part: fx.Node) -> int:
    """Of the bias of an opening product that makes columns: its last dimension."""
    return arguments_of(part)[0].meta["val"].dim() - 1


def _needed(results: tuple[fx.Node, ...], wide: frozenset[fx.Node]) -> tuple[fx.Node, ...]:
    """The ops that make ``results`` from what is not wide, in captured order."""
    found: set[fx.Node] = set()
    pending = list(results)
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        if node in wide and not is_elementwise(node):
            continue
        for each in node.all_input_nodes:
            source = seen_through(arguments_of(each)[0]) if is_flip(each) else seen_through(each)
            if source in wide:
                pending.append(source)
    ordered = tuple(node for node in results[0].graph.nodes if node in found)
    if not found.intersection(wide):
        raise InternalError("a tile reads nothing wide")
    return ordered
