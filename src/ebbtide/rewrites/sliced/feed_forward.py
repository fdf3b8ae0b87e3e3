"""Feed-forward layers: the N rows and H columns between two linear layers, more than either of them reads or gives.

Products that sum over the columns are made by rows, forward and backward; those that sum over the rows, which make the
gradients of weights and biases, by columns. No sum is taken apart.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from ebbtide.rewrites.rule import require
from ebbtide.rewrites.sliced.regions import Growth
from ebbtide.rewrites.views import seen
from ebbtide.torch_seams.graphs import arguments_of

__all__ = ["FeedForward"]

_OPENING = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})


class FeedForward(Growth):
    """See ``sliced.regions``; nothing large is given to it."""

    rank = 2
    axes = ("rows", "columns")
    whole = "hidden values of a feed-forward layer stay whole"

    @classmethod
    def opens(cls, node: fx.Node) -> bool:
        """Whether it is a product that makes more columns than it reads."""
        if node.target not in _OPENING or node.kwargs:
            return False
        return node.meta["val"].shape[1] > arguments_of(node)[-2].meta["val"].shape[1]

    def makes(self, node: fx.Node) -> bool:
        """Whether it is a product that widens."""
        return self.opens(node)

    def made_of(self, node: fx.Node) -> list[fx.Node]:
        """All that ``node`` reads but numbers."""
        return [seen(each, self.rank)[0] for each in node.all_input_nodes if each.meta["val"].dim()]

    def looks_like_one(self, early: Iterable[fx.Node]) -> bool:
        """Whether a linear layer reads what elementwise ops make of the product."""
        return any(map(self.keeps_places, self.members)) and any(True for _ in early)

    def check(self, late: frozenset[fx.Node]) -> None:
        """A layer that is trained, or that something before it is."""
        require(any(map(self.keeps_places, self.members)), "nothing is made of them")
        require(bool(self.closing["rows"] - late), "no linear layer reads them alone")
        require(bool(self.members & late), "nothing of it is trained")
        require(self.closing["columns"] <= late, "a product sums over their rows")
        values = [each.meta["val"] for each in self.members]
        numbers = all(each.is_floating_point() or each.dtype is torch.bool for each in values)
        require(numbers, "some of them are no numbers")
