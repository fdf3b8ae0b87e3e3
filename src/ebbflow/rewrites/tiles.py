"""What of a region is made in slices, along which axis, and the call that does it.

By ``rewrites.wide``, a region has wide values of N rows and H columns. A *tile* makes some of its narrow results, and
whatever wide values these need, in slices of one axis:
1. By *rows*, wide values are cut along dimension 0. An opening product takes rows of its first operand, and the second
   one whole; a closing product of slices gives rows of its result. Sums over N cannot be made so.
2. By *columns*, wide values are cut along dimension 1. An opening product takes its first operand whole, columns of the
   second one and the bias; a product that sums over N gives rows or columns of its result, whichever H is. Closing
   products cannot be made so: they sum over H.
No sum is taken apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ebbflow.errors import InternalError
from ebbflow.rewrites.tiled import Tiled
from ebbflow.rewrites.wide import PRODUCTS, Region, is_elementwise, is_flip, is_sum_of_rows, seen_through
from ebbflow.torch_seams.graphs import arguments_of

if TYPE_CHECKING:
    from ebbflow.rewrites.attention_calls import ByEntry

__all__ = ["COLUMNS", "ROWS", "Tile", "tiles_of"]

ROWS, COLUMNS = "rows", "columns"


@dataclass(frozen=True)
class Tile:
    """Some results of a region.

    Attributes:
        axis: ``ROWS`` or ``COLUMNS``, or that of another rule.
        results: captured nodes, in order.
        parts: captured ops that it runs, in order, results among them.
        given: captured nodes that it reads.
        cuts: of ``given``.
        target: what is called.
    """

    axis: str
    results: tuple[fx.Node, ...]
    parts: tuple[fx.Node, ...]
    given: tuple[fx.Node, ...]
    cuts: tuple[int | None, ...]
    target: Tiled | ByEntry


def tiles_of(region: Region) -> list[Tile]:
    """The forward's results by rows, the backward's by rows, the gradients of weights by columns: those there are."""
    early = tuple(each for each in region.closing if each not in region.late)
    late = tuple(each for each in region.closing if each in region.late)
    wanted = ((ROWS, early), (ROWS, late), (COLUMNS, region.weights))
    return [_Builder(region, axis, results).tile() for axis, results in wanted if results]


class _Builder:
    """Writes the graph of one slice."""

    def __init__(self, region: Region, axis: str, results: tuple[fx.Node, ...]) -> None:
        self.axis, self.results = axis, results
        self.wide = frozenset(region.members)
        self.parts = _needed(results, self.wide)
        self.graph = fx.Graph()
        self.inner: dict[fx.Node, fx.Node] = {}  # of members, of their transposed views, and of results
        self.cut: dict[fx.Node, int] = {}  # of the same
        self.inputs: dict[tuple[fx.Node, int | None], fx.Node] = {}
        self.says: list[str] = []
        self._words: dict[fx.Node, str] = {}

    def tile(self) -> Tile:
        """All of it."""
        pairs = list(dict.fromkeys(pair for part in self.parts for pair in self._outer(part)))
        for index, pair in enumerate(pairs):
            self.inputs[pair] = self.graph.placeholder(f"given_{index}")
            self._words[self.inputs[pair]] = f"%{index}"
        for part in self.parts:
            self._issue(part)
        self.graph.output(tuple(self.inner[each] for each in self.results))
        given, cuts = zip(*pairs, strict=True)
        outputs = [self.cut[each] for each in self.results]
        returned = ", ".join(self._words[self.inner[each]] for each in self.results)
        taken = ", ".join("whole" if cut is None else str(cut) for cut in cuts)
        text = f"{taken}; {'; '.join(self.says)}; {returned}"
        names = ", ".join(str(part.target).split(".")[1] for part in self.parts)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        target = Tiled(self.graph, cuts, outputs, f"by_{self.axis}[{names}; {digest}]")
        return Tile(self.axis, self.results, self.parts, given, cuts, target)

    def _outer(self, part: fx.Node) -> Iterator[tuple[fx.Node, int | None]]:
        """What ``part`` reads that is no part itself, and along which dimension that is cut."""
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

    def _issue(self, part: fx.Node) -> None:
        arguments = [each for each in arguments_of(part) if isinstance(each, fx.Node)]
        places = {each: (position, len(arguments)) for position, each in enumerate(arguments)}

        def inner_of(node: fx.Node) -> fx.Node:
            if not self._is_inner(node):
                return self.inputs[node, self._cut_of(part, *places[node])]
            if not is_flip(node):
                return self.inner[seen_through(node)]
            if node not in self.inner:
                source = self.inner[seen_through(arguments_of(node)[0])]
                self.inner[node] = self._call(torch.ops.aten.t.default, (source,), {})
                self.cut[node] = 1 - self.cut[seen_through(arguments_of(node)[0])]
            return self.inner[node]

        args, kwargs = fx.map_arg((part.args, part.kwargs), inner_of)
        self.inner[part] = self._call(part.target, args, kwargs)
        self.cut[part] = self._result_cut(part)

    def _result_cut(self, part: fx.Node) -> int:
        if self.axis == ROWS:
            return 0
        if part in self.wide or is_sum_of_rows(part):
            return 1
        first = arguments_of(part)[0]
        return 0 if self._is_inner(first) else 1

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        node = self.graph.call_function(target, args, dict(kwargs))
        words = fx.map_arg((args, dict(kwargs)), lambda each: _Word(self._words[each]))
        inner = [repr(each) for each in words[0]] + [f"{key}={each!r}" for key, each in sorted(words[1].items())]
        self._words[node] = f"_{len(self.says)}"
        self.says.append(f"{target}({', '.join(inner)})")
        return node


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


class _Word(str):
    """Text that prints without quotes inside of argument lists."""

    def __repr__(self) -> str:
        return str(self)
