"""Attention in slices of its entries: the calls that take the place of a region, and what is called.

By ``attention.regions``, entries do not mix. So a few entries at a time, the call makes square values of these alone,
drops them, and puts the results in their places: the forward's products in one call, the backward's in another, which
makes the scores and probabilities again that it needs.

Inside of a call, square values have three dimensions. What it is given is *flat*, cut along its first dimension, which
is that of entries; or *spread*, with the last few of the dimensions of entries that the captured step has, each as
long or 1; or *whole*, for all entries the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from ebbtide.rewrites.attention.regions import BATCHED, SOFTMAXES, Attention, is_row_op
from ebbtide.rewrites.once import once
from ebbtide.rewrites.sliced.calls import InSlices, SliceWriter, Tile
from ebbtide.rewrites.views import seen

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


class ByEntry(InSlices):
    """The target of a call: ``target(size, *tensors)`` returns a tuple.

    Args:
        graph: of one slice: an input for each tensor, and a tuple of outputs.
        kinds: of each input: ``FLAT``, ``SPREAD`` or ``WHOLE``.
        leading: the dimensions of entries.
        text: its name, which says all that it does and is the same in every process and for every size.
    """

    def __init__(self, graph: fx.Graph, kinds: Sequence[str], leading: Sequence[int], text: str) -> None:
        super().__init__(graph, "by_entry", text)
        self.kinds, self.leading = tuple(kinds), tuple(leading)

    def __call__(self, size: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The results, made of at most ``size`` entries at a time."""
        whole: list[Tensor] = []
        for block in blocks(self.leading, size):
            given = [
                part_of_entries(each, kind, self.leading, block) for each, kind in zip(tensors, self.kinds, strict=True)
            ]
            made = self.run(*given)
            if not whole:
                count = math.prod(self.leading)
                whole = [part.new_empty((count, *part.shape[1:])) for part in made]
            for index, each in enumerate(whole):
                part_of_entries(each, FLAT, self.leading, block).copy_(made[index])
            del given, made  # before the next ones are made
        return tuple(whole)


@once
def calls_of(region: Attention) -> list[Tile]:
    """The forward's products, and the backward's where there are any."""
    early = tuple(each for each in region.closing if each not in region.late)
    late = tuple(each for each in region.closing if each in region.late)
    return [_tile(region, results) for results in (early, late) if results]


def _tile(region: Attention, results: tuple[fx.Node, ...]) -> Tile:
    writer = _Writer(region, results)
    given, kinds = writer.written()
    text = writer.text(ENTRIES, f"{region.leading}; {', '.join(kinds)}")
    target = ByEntry(writer.graph, kinds, region.leading, text)
    cuts = tuple(None if each == WHOLE else 0 for each in kinds)
    return Tile(ENTRIES, results, writer.parts, given, cuts, target)


def _needed(square: frozenset[fx.Node], results: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """The ops that make ``results`` from what is given, in captured order."""
    found: set[fx.Node] = set()
    pending = list(results)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [seen(each)[0] for each in node.all_input_nodes if seen(each)[0] in square]
    return tuple(node for node in results[0].graph.nodes if node in found)


class _Writer(SliceWriter):
    def __init__(self, region: Attention, results: tuple[fx.Node, ...]) -> None:
        self.square = frozenset(region.members)
        super().__init__(results, _needed(self.square, results))
        self.inner: dict[tuple[fx.Node, bool], fx.Node] = {}  # of parts, and whether they are swapped

    def made(self, part: fx.Node) -> fx.Node:
        """The slice of ``part``."""
        return self.inner[part, False]

    def _is_inner(self, node: fx.Node) -> bool:
        return seen(node)[0] in self.square

    def given(self, part: fx.Node) -> Iterator[tuple[fx.Node, str]]:
        """Flat, spread or whole."""
        for each in part.all_input_nodes:
            if not self._is_inner(each):
                yield each, kind_of(part, each)

    def write(self, part: fx.Node) -> None:
        """``part``, with a softmax over the last dimension."""

        def inner_of(node: fx.Node) -> fx.Node:
            if not self._is_inner(node):
                return self.inputs[node, kind_of(part, node)]
            made, swapped = seen(node)
            if (made, swapped) not in self.inner:
                self.inner[made, swapped] = self.call(_aten.transpose.int, (self.inner[made, False], 1, 2), {})
            return self.inner[made, swapped]

        args, kwargs = fx.map_arg((part.args, part.kwargs), inner_of)
        if (position := SOFTMAXES.get(part.target)) is not None:
            args = (*args[:position], -1, *args[position + 1 :])
        self.inner[part, False] = self.call(part.target, args, kwargs)


def kind_of(part: fx.Node, node: fx.Node) -> str:
    """How ``node``, which ``part`` reads and is not square, is given."""
    shape = node.meta["val"].shape
    if part.target in BATCHED:
        return WHOLE if shape[0] == 1 or len(shape) < 3 else FLAT
    assert is_row_op(part)
    if part.meta["val"].dim() == 3:
        return FLAT if len(shape) == 3 and shape[0] > 1 else WHOLE
    return SPREAD if len(shape) > 2 else WHOLE
