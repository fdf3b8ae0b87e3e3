"""Along which axes an op can be taken apart: a table of ops, and what follows from it.

1. Large values have a *rank*, two (rows and columns) or three (entries, queries and keys). One that has more dimensions
   is seen with the first ones taken for one.
2. Where the result of an op is *cut* along a dimension, each of its operands is cut along one dimension, or needed
   whole. Of a product, :data:`PRODUCTS` says which: letters name dimensions, and one that the result has not is summed,
   so that nothing can be cut along it. Of what makes each number of those in its place, operands are cut where the
   result is; :data:`MIXED_DIMENSION` names the ops that mix one dimension besides, along which they cannot be cut.
3. What is given to an op whose result has more dimensions than its rank is *spread*: it has the last few of the
   dimensions that are taken for one, each as long or 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, fx

from ebbtide.capture.traits import draws_random
from ebbtide.rewrites.spans import STEP, even_spans
from ebbtide.torch_seams.dispatcher import OpOverload, is_pointwise, schema_of
from ebbtide.torch_seams.graphs import arguments_of

__all__ = [
    "MIXED_DIMENSION",
    "PRODUCTS",
    "SPREAD",
    "Axis",
    "Cut",
    "Piece",
    "can_be_cut",
    "is_elementwise",
    "is_product",
    "mixed_from_the_end",
    "operand_cut",
    "result_cut",
    "swapped_cut",
]

_aten = torch.ops.aten
PRODUCTS: dict[object, str] = {
    _aten.mm.default: "nk,km->nm",
    _aten.addmm.default: "nm,nk,km->nm",
    _aten.bmm.default: "bnk,bkm->bnm",
    _aten.baddbmm.default: "bnm,bnk,bkm->bnm",
}
"""Dimensions of operands and result; an operand with fewer has the last ones, and one of length 1 is for all."""
_SUM_OF_ROWS = "nm->1m"
MIXED_DIMENSION: dict[object, int] = {
    _aten._softmax.default: 1,
    _aten._safe_softmax.default: 1,
    _aten._softmax_backward_data.default: 2,
}
"""Ops whose result has the shape of what they read and that mix one of its dimensions: by op, the position of the
argument that names it, as a number or as a list of one."""
SPREAD: Literal["spread"] = "spread"
Cut = int | Literal["spread"] | None
"""How an operand is cut: along a dimension; spread, by definition 3; ``None`` where it is needed whole."""
Piece = tuple[tuple[int, ...], int, int]
"""A slice of the dimensions that are taken for one: all but the last by number, of the last one from where to where."""


@dataclass(frozen=True)
class Axis:
    """What calls in slices are cut along.

    Attributes:
        name: in words, several.
        dim: of large values.
        rank: of large values.
        leading: the dimensions that the cut one stands for, or it alone.
        even: whether slices begin at multiples of :data:`STEP`, as those of one dimension have to.
    """

    name: str
    dim: int
    rank: int
    leading: tuple[int, ...]
    even: bool

    @property
    def length(self) -> int:
        """How long the cut dimension is."""
        return math.prod(self.leading)

    def size_of(self, part: float) -> int:
        """How long a slice is, of which there are about ``part``."""
        if self.even:
            return max(STEP, int(self.length // part))
        return max(1, min(int(self.length // part), self.leading[-1]))

    def pieces(self, size: int) -> Iterator[Piece]:
        """Slices of about ``size`` that cover all of it, in order."""
        *outer, last = self.leading
        spans = even_spans(last, size) if self.even else [(a, min(a + size, last)) for a in range(0, last, size)]
        for index in itertools.product(*map(range, outer)):
            for begin, end in spans:
                yield index, begin, end

    def share(self, size: int) -> float:
        """The share of the longest slice."""
        return max(end - begin for _, begin, end in self.pieces(size)) / self.length

    def part(self, tensor: Tensor, cut: Cut, piece: Piece) -> Tensor:
        """``piece`` of ``tensor``, with as many dimensions as the rank where it is spread over more."""
        if cut is None:
            return tensor
        index, begin, end = piece
        if cut != SPREAD:
            first = 0
            for place, length in zip(index, self.leading, strict=False):
                first = first * length + place
            return tensor.narrow(cut, first * self.leading[-1] + begin, end - begin)
        for place in index[len(self.leading) + self.rank - 1 - tensor.dim() :]:
            tensor = tensor.select(0, place if tensor.shape[0] > 1 else 0)
        return tensor.narrow(0, begin, end - begin) if tensor.shape[0] > 1 else tensor


# -- the ops --------------------------------------------------------------------------------------------------------


def _letters(node: fx.Node) -> tuple[list[str], str] | None:
    text = _SUM_OF_ROWS if _is_sum_of_rows(node) else PRODUCTS.get(node.target)
    if text is None:
        return None
    operands, _, result = text.partition("->")
    return operands.split(","), result


def _is_sum_of_rows(node: fx.Node) -> bool:
    """Whether it sums over the first of two dimensions, which stays, and changes no type."""
    return (
        node.target is _aten.sum.dim_IntList
        and list(arguments_of(node)[1]) == [0]
        and node.meta["val"].dim() == 2
        and node.meta["val"].dtype == arguments_of(node)[0].meta["val"].dtype
    )


def is_product(node: fx.Node) -> bool:
    """Whether it is in the table of products and sums."""
    return node.op == "call_function" and _letters(node) is not None


def is_elementwise(node: fx.Node) -> bool:
    """Whether each number of the one result is made of those in its place, and of nothing drawn."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or draws_random(node):
        return False
    if any(isinstance(each, fx.Node) for each in node.kwargs.values()):
        return False
    if target is _aten._to_copy.default:
        (source,) = node.all_input_nodes
        strided = node.kwargs.get("layout") in (None, torch.strided)
        plain = set(node.kwargs) <= {"dtype", "layout", "device"} and strided
        return plain and source.meta["val"].device == node.meta["val"].device
    schema = schema_of(target)
    one = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor" and not schema.is_mutable
    return one and is_pointwise(target)


def mixed_from_the_end(node: fx.Node) -> int | None:
    """The dimension that an op of :data:`MIXED_DIMENSION` mixes, from the last one, -1, on; ``None`` for others."""
    if node.target not in MIXED_DIMENSION:
        return None
    named, dims = arguments_of(node)[MIXED_DIMENSION[node.target]], node.meta["val"].dim()
    named = [named] if isinstance(named, int) else named
    return named[0] % dims - dims if len(named) == 1 else None


def can_be_cut(node: fx.Node, cut: int, rank: int) -> bool:
    """Whether ``node`` makes what it reads, of its shape or less, into a value that can be cut there."""
    if is_elementwise(node):
        return True
    if node.op != "call_function" or (mixed := mixed_from_the_end(node)) is None:
        return False
    dtypes = {each.meta["val"].dtype for each in (node, *node.all_input_nodes)}
    return len(dtypes) == 1 and max(rank + mixed, 0) != cut


def operand_cut(node: fx.Node, position: int, cut: int, rank: int) -> Cut:
    """How the argument at ``position`` is cut, as ``node`` reads it, where the result is along ``cut``."""
    value, shape = node.meta["val"], arguments_of(node)[position].meta["val"].shape
    if (letters := _letters(node)) is not None:
        operands, result = letters
        names = operands[position][-len(shape) :]
        at, length = names.find(result[cut]), value.shape[cut]
    elif cut == 0 and value.dim() > rank:
        return SPREAD if len(shape) >= rank else None
    else:
        at, length = len(shape) - rank + cut, value.shape[cut - rank]
    return None if at < 0 or shape[at] == 1 != length else at


def result_cut(node: fx.Node, position: int, cut: Cut, rank: int) -> int | None:
    """Along which dimension the result of a product is cut where that argument is; ``None`` where that is summed."""
    dims = range(node.meta["val"].dim())
    return next((each for each in dims if operand_cut(node, position, each, rank) == cut), None)


def swapped_cut(cut: int, rank: int) -> int:
    """``cut`` where the last two dimensions are swapped."""
    return 2 * rank - 3 - cut if cut >= rank - 2 else cut
