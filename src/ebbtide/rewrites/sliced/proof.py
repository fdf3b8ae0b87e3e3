"""The proof that a step with calls in slices is the step without them: nothing runs.

Every value of the new graph claims one of the old (``capture.claims``). Of a call in slices:
1. Its parts (``rewrites.rewrite_proof``) are called as the old graph does, with the same constants and arguments that
   claim those of the old op. What it makes itself is seen through views of the old step that keep the order of
   elements and all dimensions of the rank but the first, or swap the last two.
2. Each value of a slice is *whole*, or it is *cut*: it is the elements of one slice of the axis, the same for all.
   a. What is given is cut as the call says: along a dimension as long as the axis; or spread over the dimensions that
      the axis stands for, each as long or 1.
   b. The result of an op that keeps places (``sliced.axes``) is cut as what it reads that the call has made, which has
      its shape. What else it reads is cut there too, or the same for all slices.
   c. That of a product, along a dimension along which the table says so of all that it reads; so no sum is taken apart.
   d. A view that swaps the last two dimensions is cut along the other one of these.
3. Results are put together along their cuts, and claim their parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ebbtide.capture.claims import Results
from ebbtide.capture.joint import Captured
from ebbtide.rewrites.replaced import Replaced
from ebbtide.rewrites.rewrite_proof import CallProof, RewriteProof
from ebbtide.rewrites.sliced.axes import (
    SPREAD,
    Cut,
    can_be_cut,
    is_elementwise,
    is_product,
    operand_cut,
    swapped_cut,
)
from ebbtide.rewrites.sliced.calls import InSlices, moved_arguments
from ebbtide.rewrites.views import seen
from ebbtide.torch_seams.graphs import arguments_of

__all__ = ["prove_sliced"]

_SWAP = torch.ops.aten.transpose.int


def prove_sliced(step: Captured, after: Captured, name: str) -> list[Replaced]:
    """What each call in ``after`` stands for, which is ``step`` but for them.

    Raises:
        RewriteError: if it is not.
    """
    return _Proof(step, f"a step with {name} in slices").replaced(after)


class _Proof(RewriteProof):
    """Claims are old nodes."""

    def of_rule(self, node: fx.Node) -> Results | None:
        """What the results of a call in slices claim."""
        if not isinstance(node.target, InSlices):
            return None
        results = _Call(self, node, node.target).results()
        self.stands_for(node, results)
        return results


class _Call(CallProof):
    """The proof of one call (definitions 1 to 3).

    Attributes:
        cuts: of nodes of its graph.
        own: what it has made, and swapped views of that, which are true.
    """

    def __init__(self, proof: RewriteProof, node: fx.Node, target: InSlices) -> None:
        size, *given = node.args
        super().__init__(proof, node, target.graph, given)
        self.target, self.axis = target, target.axis
        self.require(type(size) is int and size > 0, f"{node.name} has slices of {size}")
        inputs = target.graph.find_nodes(op="placeholder")
        self.require(len(inputs) == len(target.inputs), f"{node.name} has other arguments")
        self.cuts: dict[fx.Node, Cut] = dict(zip(inputs, target.inputs, strict=True))
        self.own: dict[fx.Node, bool] = {}

    def is_view(self, inner: fx.Node) -> bool:
        """Whether it swaps the last two dimensions (definition 2d)."""
        if inner.target is not _SWAP:
            return False
        source, *dims = arguments_of(inner)
        last = [self.axis.rank - 2, self.axis.rank - 1]
        self.require(source in self.own and sorted(dims) == last, f"{inner} swaps other dimensions")
        self.claims[inner], self.own[inner] = self.claims[source], not self.own[source]
        self.cuts[inner] = swapped_cut(self.cuts[source], self.axis.rank)  # type: ignore[arg-type]
        return True

    def call(self, inner: fx.Node, part: fx.Node) -> None:
        """Take up a call of an old op (definition 1)."""
        self.require(part.target is inner.target, f"{inner} is not {part}")
        theirs = moved_arguments(part, part.args), part.kwargs
        for one, other in self.pairs(inner, part, (inner.args, inner.kwargs), theirs):
            if one in self.own:
                alike = isinstance(other, fx.Node) and seen(other, self.axis.rank) == (self.claims[one], self.own[one])
            else:
                alike = self.claims[one] is other
            self.require(alike, f"{inner} reads other values than {part}")
        self.cuts[inner] = self._product_cut(inner, part) if is_product(part) else self._cut_in_place(inner, part)
        self.own[inner] = False

    def _product_cut(self, inner: fx.Node, part: fx.Node) -> int:
        """Along which dimension the result of a product is cut (definition 2c)."""
        args = arguments_of(inner)
        positions = [position for position, each in enumerate(args) if isinstance(each, fx.Node)]
        found = [self.cuts[args[position]] for position in positions]
        value = part.meta["val"]
        for cut in range(value.dim()):
            if found == [operand_cut(part, position, cut, self.axis.rank) for position in positions]:
                for position in positions:
                    self._is_long(args[position])
                self.require(value.shape[cut] == self.axis.length, f"{part.name} has another length")
                return cut
        raise self.proof.wrong(f"{part.name} would sum over slices, or reads slices of different axes")

    def _cut_in_place(self, inner: fx.Node, part: fx.Node) -> int:
        """Along which dimension the result of what keeps places is cut (definition 2b)."""
        rank, value, args = self.axis.rank, part.meta["val"], arguments_of(inner)
        tensors = {position: each for position, each in enumerate(args) if isinstance(each, fx.Node)}
        own = [each for each in tensors.values() if each in self.own]
        self.require(bool(own), f"{part.name} reads nothing of the slice")
        cut = self.cuts[own[0]]
        assert isinstance(cut, int)
        self.require(can_be_cut(part, cut, rank), f"{part.name} mixes what is cut")
        self.require(value.is_contiguous(), f"{part.name} is laid out otherwise")
        for position, each in tensors.items():
            theirs = self.claims[each].meta["val"]
            if each in self.own:
                alike = theirs.shape[1 - rank :] == value.shape[1 - rank :] and theirs.numel() == value.numel()
                alike = alike and theirs.is_contiguous() and not self.own[each] and self.cuts[each] == cut
                self.require(alike, f"{part.name} reads what has another layout, or slices of different axes")
            else:
                self.require(is_elementwise(part), f"{part.name} reads other slices")
                alike = self.cuts[each] == operand_cut(part, position, cut, rank)
                self.require(alike, f"{part.name} reads other slices")
                self._is_long(each)
                self._is_apart(each, value)
        return cut

    def _is_apart(self, inner: fx.Node, value: torch.Tensor) -> None:
        """Require that slices of what is given are those of ``value``, which is made of it (2a)."""
        rank, shape = self.axis.rank, self.claims[inner].meta["val"].shape
        leading = value.shape[: 1 - rank]
        if self.cuts[inner] == SPREAD:
            pairs = zip(reversed(shape[: 1 - rank]), reversed(leading), strict=False)
            alike = tuple(leading) == self.axis.leading and all(mine in (1, length) for mine, length in pairs)
            self.require(alike and self.axis.dim == 0, f"{inner} is spread over other dimensions")
        else:
            own = shape[: max(len(shape) - rank + 1, 0)]
            whole = value.dim() == rank or all(each == 1 for each in own)
            self.require(whole, f"{inner} is other numbers for each slice")

    def _is_long(self, inner: fx.Node) -> None:
        """Require that what is cut along one dimension is as long there as the axis (2a)."""
        cut = self.cuts[inner]
        if inner not in self.own and isinstance(cut, int):
            alike = self.claims[inner].meta["val"].shape[cut] == self.axis.length
            self.require(alike, f"{inner} is cut along another axis than the rest")

    def returned(self, made: Any) -> Results:
        """What the results claim (definition 3)."""
        alike = isinstance(made, tuple) and 0 < len(made) == len(self.target.outputs)
        self.require(alike, f"{self.node.name} returns {made}")
        for each, cut in zip(made, self.target.outputs, strict=True):
            own = self.own.get(each) is False
            self.require(own and self.cuts[each] == cut, f"{self.node.name} puts {each} together otherwise")
            value = self.claims[each].meta["val"]
            alike = value.dim() == self.axis.rank and value.is_contiguous() and value.shape[cut] == self.axis.length
            self.require(alike, f"{self.node.name} returns {each} laid out otherwise")
        return Results(self.claims[each] for each in made)
