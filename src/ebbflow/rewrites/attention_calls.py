"""Attention in slices of its entries: the calls that take the place of a region, and what is called.

By ``rewrites.attention``, entries do not mix. So a few entries at a time, the call makes square values of these alone,
drops them, and puts the results in their places: the forward's products in one call, the backward's in another, which
makes the scores and probabilities again that it needs.

Inside of a call, square values have three dimensions. What it is given is *flat*, cut along its first dimension, which
is that of entries; or *spread*, with the last few of the dimensions of entries that the captured step has, each as
long or 1; or *whole*, for all entries the same.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ebbflow.rewrites.attention import BATCHED, SOFTMAXES, Attention, is_row_op
from ebbflow.rewrites.tiles import Tile
from ebbflow.rewrites.views import seen

__all__ = ["ENTRIES", "FLAT", "SPREAD", "WHOLE", "ByEntry", "blocks", "calls_of", "part_of_entries"]

ENTRIES = "entries"
"""The axis of these calls, as ``Tile.axis``."""
FLAT, SPREAD, WHOLE = "flat", "spread", "whole"
_aten = torch.ops.aten


def blocks(leading: Sequence[int], size: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Entries, at most ``size`` at a time: all dimensions but the last by number, of that one from where to where."""
    *outer, last = leading
    for index in itertools.product(*map(range, outer)):
        for a in range(0, last, size):
            yield index, a, min(a + size, last)


def part_of_entries(
    tensor: Tensor, kind: str, leading: Sequence[int], block: tuple[tuple[int, ...], int, int]
) -> Tensor:
    """The entries of ``block``, with three dimensions where ``tensor`` has more."""
    index, a, b = block
    if kind == WHOLE:
        return tensor
    if kind == FLAT:
        first = 0
        for place, length in zip(index, leading, strict=False):
            first = first * length + place
        return tensor.narrow(0, first * leading[-1] + a, b - a)
    for place in index[len(leading) + 2 - tensor.dim() :]:
        tensor = tensor.select(0, place if tensor.shape[0] > 1 else 0)
    return tensor.narrow(0, a, b - a) if tensor.shape[0] > 1 else tensor


class ByEntry:
    """The target of a call: ``target(size, *tensors)`` returns a tuple.

    Args:
        graph: of one slice: an input for each tensor, and a tuple of outputs.
        kinds: of each input: ``FLAT``, ``SPREAD`` or ``WHOLE``.
        leading: the dimensions of entries.
        text: its name, which says all that it does and is the same in every process and for every size.
    """

    borrows = True
    """Nothing that it is given is written to (``cost.room``)."""

    def __init__(self, graph: fx.Graph, kinds: Sequence[str], leading: Sequence[int], text: str) -> None:
        self.__name__ = "by_entry"  # by which generated code calls it
        self.graph = graph
        self.kinds, self.leading = tuple(kinds), tuple(leading)
        self._text = text
        self._run = fx.GraphModule(torch.nn.Module(), graph).forward

    def __call__(self, size: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The results, made of at most ``size`` entries at a time."""
        whole: list[Tensor] = []
        for block in blocks(self.leading, size):
            given = [
                part_of_entries(each, kind, self.leading, block) for each, kind in zip(tensors, self.kinds, strict=True)
            ]
            made = self._run(*given)
            if not whole:
                count = math.prod(self.leading)
                whole = [part.new_empty((count, *part.shape[1:])) for part in made]
            for index, each in enumerate(whole):
                part_of_entries(each, FLAT, self.leading, block).copy_(made[index])
            del given, made  # before the next ones are made
        return tuple(whole)

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


def calls_of(region: Attention) -> list[Tile]:
    """The forward's products, and the backward's where there are any."""
    early = tuple(each for each in region.closing if each not in region.late)
    late = tuple(each for each in region.closing if each in region.late)
    return [_Builder(region, results).tile() for results in (early, late) if results]


class _Builder:
    """Writes the graph of one slice."""

    def __init__(self, region: Attention, results: tuple[fx.Node, ...]) -> None:
        self.leading, self.results = region.leading, results
        self.square = frozenset(region.members)
        self.parts = self._needed()
        self.graph = fx.Graph()
        self.inner: dict[tuple[fx.Node, bool], fx.Node] = {}  # of parts, and whether they are swapped
        self.inputs: dict[tuple[fx.Node, str], fx.Node] = {}
        self.says: list[str] = []
        self._words: dict[fx.Node, str] = {}

    def _needed(self) -> tuple[fx.Node, ...]:
        """The ops that make the results from what is given, in captured order."""
        found: set[fx.Node] = set()
        pending = list(self.results)
        while pending:
            node = pending.pop()
            if node not in found:
                found.add(node)
                pending += [seen(each)[0] for each in node.all_input_nodes if seen(each)[0] in self.square]
        return tuple(node for node in self.results[0].graph.nodes if node in found)

    def tile(self) -> Tile:
        """All of it."""
        pairs = list(dict.fromkeys(pair for part in self.parts for pair in self._given(part)))
        for index, pair in enumerate(pairs):
            self.inputs[pair] = self.graph.placeholder(f"given_{index}")
            self._words[self.inputs[pair]] = f"%{index}"
        for part in self.parts:
            self._issue(part)
        self.graph.output(tuple(self.inner[each, False] for each in self.results))
        given, kinds = zip(*pairs, strict=True)
        returned = ", ".join(self._words[self.inner[each, False]] for each in self.results)
        text = f"{self.leading}; {', '.join(kinds)}; {'; '.join(self.says)}; {returned}"
        names = ", ".join(str(part.target).split(".")[1] for part in self.parts)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        target = ByEntry(self.graph, kinds, self.leading, f"by_{ENTRIES}[{names}; {digest}]")
        cuts = tuple(None if each == WHOLE else 0 for each in kinds)
        return Tile(ENTRIES, self.results, self.parts, given, cuts, target)

    def _is_inner(self, node: fx.Node) -> bool:
        return seen(node)[0] in self.square

    def _given(self, part: fx.Node) -> Iterator[tuple[fx.Node, str]]:
        for each in part.all_input_nodes:
            if not self._is_inner(each):
                yield each, kind_of(part, each)

    def _issue(self, part: fx.Node) -> None:
        def inner_of(node: fx.Node) -> fx.Node:
            if not self._is_inner(node):
                return self.inputs[node, kind_of(part, node)]
            made, swapped = seen(node)
            if (made, swapped) not in self.inner:
                self.inner[made, swapped] = self._call(_aten.transpose.int, (self.inner[made, False], 1, 2), {})
            return self.inner[made, swapped]

        args, kwargs = fx.map_arg((part.args, part.kwargs), inner_of)
        if (position := SOFTMAXES.get(part.target)) is not None:
            args = (*args[:position], -1, *args[position + 1 :])
        self.inner[part, False] = self._call(part.target, args, kwargs)

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        node = self.graph.call_function(target, args, dict(kwargs))
        words = fx.map_arg((args, dict(kwargs)), lambda each: _Word(self._words[each]))
        inner = [repr(each) for each in words[0]] + [f"{key}={each!r}" for key, each in sorted(words[1].items())]
        self._words[node] = f"_{len(self.says)}"
        self.says.append(f"{target}({', '.join(inner)})")
        return node


def kind_of(part: fx.Node, node: fx.Node) -> str:
    """How ``node``, which ``part`` reads and is not square, is given."""
    shape = node.meta["val"].shape
    if part.target in BATCHED:
        return WHOLE if shape[0] == 1 or len(shape) < 3 else FLAT
    assert is_row_op(part)
    if part.meta["val"].dim() == 3:
        return FLAT if len(shape) == 3 and shape[0] > 1 else WHOLE
    return SPREAD if len(shape) > 2 else WHOLE


class _Word(str):
    """Text that prints without quotes inside of argument lists."""

    def __repr__(self) -> str:
        return str(self)
