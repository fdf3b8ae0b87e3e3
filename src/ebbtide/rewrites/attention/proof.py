"""The proof that a step with attention in slices is the step without: nothing runs.

Every value of the new graph claims one of the old (``rewrites.claims``). Of a call in slices:
1. It names old ops, its *parts*, and its graph calls each as the old graph does, with the same constants and arguments
   that claim those of the old op. What it makes itself is seen through views of the old step that keep the order of
   elements and the last two dimensions, or swap those.
2. Each value of a slice is *whole*, the same for all entries; or it is of the *entries* of the slice, along its first
   dimension, which are the same for all values of a slice:
   a. what is given flat has as many entries as there are, along the first of three dimensions; what is given spread
      has the last few of the dimensions of entries, each as long or 1; what is given whole has no dimension of entries
      that is longer than 1;
   b. the result of an elementwise op is of the entries where an argument is that the call has made; what else it reads
      has the same entries in the same places;
   c. so is a softmax, or its gradient, over the last dimension, and a product of batches, each operand of which is;
   d. a swapped view swaps the two dimensions that are no entries.
3. No part draws a random number or has an effect.
4. Results are of the entries, put together along the first dimension, and claim their parts, which have three.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.rewrites.attention.calls import FLAT, SPREAD, WHOLE, ByEntry
from ebbtide.rewrites.replaced import Replaced
from ebbtide.rewrites.sliced.proof import SlicedProof, SliceProof
from ebbtide.rewrites.stand_ins import StandIns
from ebbtide.rewrites.views import SAME_ORDER
from ebbtide.torch_seams.dispatcher import OpOverload, is_pointwise
from ebbtide.torch_seams.graphs import arguments_of
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["prove_attention"]

_aten = torch.ops.aten
_SOFTMAXES: dict[object, int] = {
    _aten._softmax.default: 1,
    _aten._safe_softmax.default: 1,
    _aten._softmax_backward_data.default: 2,
}


def prove_attention(step: Captured, after: Captured) -> list[Replaced]:
    """What each call in ``after`` stands for, which is ``step`` but for them.

    Raises:
        RewriteError: if it is not.
    """
    return _Proof(step, "a step with attention in slices").replaced(after)


class _Slice(SliceProof):
    """One call: definitions 2 and 4."""

    calls = ByEntry
    view = _aten.transpose.int
    target: ByEntry

    def __init__(self, proof: StandIns, node: fx.Node, target: ByEntry) -> None:
        super().__init__(proof, node, target)
        self.entries = math.prod(target.leading)
        self.kinds: dict[fx.Node, str] = {}  # of what is given
        self.swapped: dict[fx.Node, bool] = {}  # of what it has made, and views of that

    def how(self) -> Sequence[str]:
        """Flat, spread or whole."""
        return self.target.kinds

    def give(self, inner: fx.Node, how: str) -> None:
        """Definition 2a is asked where it is read."""
        self.kinds[inner] = how

    def see(self, inner: fx.Node) -> None:
        """Definition 2d."""
        source, *dims = arguments_of(inner)
        self.require(source in self.own and sorted(dims) == [1, 2], f"{inner} swaps other dimensions")
        self.claims[inner], self.swapped[inner] = self.claims[source], not self.swapped[source]

    def is_read(self, mine: fx.Node, theirs: Any) -> bool:
        """Through views that swap the last two dimensions as often."""
        made, swapped = _seen(theirs)
        return made is self.claims[mine] and swapped == self.swapped[mine]

    def place(self, inner: fx.Node, part: fx.Node) -> None:
        """Definitions 2b and 2c."""
        self._is_of_entries(inner, part)
        self.swapped[inner] = False

    def arguments(self, part: fx.Node) -> list[Any]:
        """All of an old op; of a softmax, the dimension counted from the last one."""
        args = list(part.args)
        if (position := _SOFTMAXES.get(part.target)) is not None:
            dims = part.meta["val"].dim()
            self.require(arguments_of(part)[position] % dims == dims - 1, f"{part.name} is over another dimension")
            args[position] = -1
        return tree_leaves((tuple(args), part.kwargs))

    def _is_of_entries(self, inner: fx.Node, part: fx.Node) -> None:
        """Definitions 2a to 2c, and that the part's result has these entries, in order."""
        value = part.meta["val"]
        elementwise = isinstance(part.target, OpOverload) and is_pointwise(part.target)
        elementwise = elementwise or part.target is _aten._to_copy.default
        product = part.target in (_aten.bmm.default, _aten.baddbmm.default)
        self.require(elementwise or product or part.target in _SOFTMAXES, f"{part.name} mixes entries")
        flat = value.dim() == 3 and value.shape[0] == self.entries
        spread = tuple(value.shape[:-2]) == self.target.leading and not product
        self.require((flat or spread) and value.is_contiguous(), f"{part.name} is laid out otherwise")
        tensors = inner.all_input_nodes
        for position, each in enumerate(tensors):
            theirs = self.claims[each].meta["val"]
            if each in self.own:
                alike = theirs.numel() == value.numel() and theirs.shape[-2:] == value.shape[-2:]
                alike = alike and not self.swapped[each]
                self.require(product or alike, f"{part.name} reads what has another layout")
            elif product:
                bias = part.target is _aten.baddbmm.default and position == 0
                alike = self.kinds[each] == FLAT and theirs.dim() == 3 and theirs.shape[0] == self.entries
                self.require(alike or (bias and self._is_whole(each)), f"{part.name} reads other entries")
            else:
                alike = self._is_whole(each) or self._is_alike(each, flat=flat, dims=value.dim())
                self.require(alike, f"{part.name} reads other entries")
        own = [each for each in tensors if each in self.own]
        self.require(product or bool(own), f"{part.name} reads nothing of the entries")
        if part.target in _SOFTMAXES or part.target is _aten._to_copy.default:
            self.require(len(own) == len(tensors), f"{part.name} reads other entries")

    def _is_whole(self, inner: fx.Node) -> bool:
        shape = self.claims[inner].meta["val"].shape
        return self.kinds[inner] == WHOLE and all(length == 1 for length in shape[:-2])

    def _is_alike(self, inner: fx.Node, *, flat: bool, dims: int) -> bool:
        """Whether what is given has the entries where an op of ``dims`` dimensions finds them."""
        shape = tuple(self.claims[inner].meta["val"].shape)
        if self.kinds[inner] == FLAT:
            return flat and dims == 3 and len(shape) == 3 and shape[0] == self.entries
        leading = self.target.leading
        own = shape[:-2]
        if self.kinds[inner] != SPREAD or dims != len(leading) + 2 or not 0 < len(own) <= len(leading):
            return False
        return all(mine in (1, length) for mine, length in zip(reversed(own), reversed(leading), strict=False))

    def put_together(self, made: Sequence[fx.Node]) -> None:
        """Definition 4."""
        for each in made:
            value = self.claims[each].meta["val"]
            entries = value.dim() == 3 and value.shape[0] == self.entries and value.is_contiguous()
            self.require(entries, f"{self.node.name} returns {each} laid out otherwise")


class _Proof(SlicedProof):
    kind = _Slice


def _seen(node: fx.Node) -> tuple[fx.Node, bool]:
    """Definition 1."""
    swapped = False
    while True:
        if node.target is _aten.transpose.int:
            source, *dims = arguments_of(node)
            count = node.meta["val"].dim()
            if sorted(each % count for each in dims) != [count - 2, count - 1]:
                return node, swapped
            swapped = not swapped
        elif node.target in SAME_ORDER or node.target is _aten.expand.default:
            source = arguments_of(node)[0]
            mine, theirs = node.meta["val"], source.meta["val"]
            if mine.shape[-2:] != theirs.shape[-2:] or mine.numel() != theirs.numel():
                return node, swapped
        else:
            return node, swapped
        node = source
