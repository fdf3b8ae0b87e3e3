"""The proof that a step with tiles is the step without them: nothing runs.

Every value of the new graph claims one of the old:
1. What both graphs call claims its like (``rewrites.claims``).
2. The call of a tile names old ops, its *parts*. Its graph calls each as the old graph does, with the same constants
   and arguments that claim those of the old op. What it makes itself is seen through views of the old step that keep
   the order of elements of a contiguous value, for slices have two dimensions where the old step may have more.
3. Each value of a slice is whole, or the part of what it claims between two places of one dimension, the *cut*; one
   that is whole is given. All cuts of a call are of one axis:
   a. what is given is cut as the call says, and as long there as everything else that is cut;
   b. the result of an elementwise op is cut as its arguments are, all but single numbers, along a dimension that
      the claimed values have in common when their leading dimensions are taken for one;
   c. a product is cut along 0 if its first operand alone is, along 0, and along 1 if its second operand alone is, along
      1, and a bias that is added is cut likewise; so the dimension that is summed over is never cut;
   d. a transposed view is cut along the other dimension; a sum over rows is cut along 1 as its argument is.
4. No part draws a random number or has an effect.
5. Results are put together along their cuts, and claim their parts. Each output of the graph claims the old one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.rewrites.feed_forward.tiled import Tiled
from ebbtide.rewrites.replaced import Replaced
from ebbtide.rewrites.sliced.proof import SlicedProof, SliceProof
from ebbtide.rewrites.stand_ins import StandIns
from ebbtide.rewrites.views import SAME_ORDER
from ebbtide.torch_seams.dispatcher import OpOverload, is_pointwise
from ebbtide.torch_seams.graphs import arguments_of

__all__ = ["prove_tiled"]

_aten = torch.ops.aten


def prove_tiled(step: Captured, after: Captured) -> list[Replaced]:
    """What each tile in ``after`` stands for, which is ``step`` but for them.

    Raises:
        RewriteError: if it is not.
    """
    return _Proof(step, "a step in slices").replaced(after)


class _Slice(SliceProof):
    """One tile: definitions 3 and 5."""

    calls = Tiled
    view = _aten.t.default
    target: Tiled

    def __init__(self, proof: StandIns, node: fx.Node, target: Tiled) -> None:
        super().__init__(proof, node, target)
        self.cuts: dict[fx.Node, int | None] = {}
        self.length: int | None = None

    def how(self) -> Sequence[int | None]:
        """Along which dimension it is cut."""
        return self.target.inputs

    def give(self, inner: fx.Node, how: int | None) -> None:
        """Definition 3a."""
        self.cuts[inner] = how
        if how is not None:
            self._is_long(self.claims[inner], how)

    def _is_long(self, claim: fx.Node, cut: int) -> None:
        length = claim.meta["val"].shape[cut]
        self.require(self.length in (None, length), f"{claim.name} is cut along another axis than the rest")
        self.length = length

    def see(self, inner: fx.Node) -> None:
        """Definition 3d."""
        (source,) = arguments_of(inner)
        self.require(source in self.own, f"{inner} transposes what is given")
        cut = self.cuts[source]
        assert cut is not None
        self.claims[inner], self.cuts[inner] = self.claims[source], 1 - cut

    def is_read(self, mine: fx.Node, theirs: Any) -> bool:
        """Through views that keep the order; transposed only where the old step reads it so."""
        if mine.target is not self.view:
            return _seen_through(theirs) is self.claims[mine]
        return theirs.target is self.view and _seen_through(arguments_of(theirs)[0]) is self.claims[mine]

    def place(self, inner: fx.Node, part: fx.Node) -> None:
        """Definitions 3b to 3d."""
        self.cuts[inner] = self._cut_of(inner, part)

    def _cut_of(self, inner: fx.Node, part: fx.Node) -> int:
        """Definitions 3b to 3d."""
        tensors = [each for each in arguments_of(inner) if isinstance(each, fx.Node)]
        cuts = [self.cuts[each] for each in tensors]
        if part.target is _aten.mm.default:
            return self._product_cut(part, *cuts)
        if part.target is _aten.addmm.default:
            bias, *operands = cuts
            cut = self._product_cut(part, *operands)
            dims = self.claims[tensors[0]].meta["val"].dim()
            alike = bias == (None if cut == 0 else dims - 1) and dims == 1
            self.require(alike, f"{part.name} adds what is cut otherwise")
            return cut
        if part.target is _aten.sum.dim_IntList:
            whole = list(arguments_of(part)[1]) == [0] and part.meta["val"].dim() == 2
            self.require(cuts == [1] and whole, f"{part.name} sums what is cut")
            return 1
        elementwise = isinstance(part.target, OpOverload) and is_pointwise(part.target)
        self.require(elementwise or part.target is _aten._to_copy.default, f"{part.name} is not elementwise")
        columns = part.meta["val"].shape[-1]
        found: set[int | None] = set()
        for each, cut in zip(tensors, cuts, strict=True):
            value = self.claims[each].meta["val"]
            if value.dim() == 0:
                self.require(cut is None, f"{part.name} reads a number in slices")
                continue
            alike = value.shape[-1] == columns and value.numel() == part.meta["val"].numel() and value.is_contiguous()
            self.require(alike and each in self.own, f"{part.name} reads what has another layout")
            found.add(cut)
        self.require(len(found) == 1 and None not in found, f"{part.name} reads slices of different axes")
        self.require(part.meta["val"].is_contiguous(), f"{part.name} is laid out otherwise")
        cut = found.pop()
        assert cut is not None
        return cut

    def _product_cut(self, part: fx.Node, first: int | None, second: int | None) -> int:
        self.require((first, second) in ((0, None), (None, 1)), f"{part.name} would sum over slices")
        return 0 if first == 0 else 1

    def put_together(self, made: Sequence[fx.Node]) -> None:
        """Definition 5."""
        self.require(self.length is not None, f"{self.node.name} cuts nothing")
        self.require(len(made) == len(self.target.outputs), f"{self.node.name} returns {made}")
        for each, cut in zip(made, self.target.outputs, strict=True):
            self.require(self.cuts[each] == cut, f"{self.node.name} puts {each} together along another dimension")
            value = self.claims[each].meta["val"]
            two = value.dim() == 2 and value.is_contiguous()
            self.require(two, f"{self.node.name} returns {each} laid out otherwise")
            self._is_long(self.claims[each], cut)


class _Proof(SlicedProof):
    kind = _Slice


def _seen_through(node: fx.Node) -> fx.Node:
    """Definition 2."""
    while node.target in SAME_ORDER:
        (node, *_) = arguments_of(node)
    return node
