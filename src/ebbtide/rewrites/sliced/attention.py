"""Attention by products and a softmax: scores of every pair of tokens, of as many entries as sequences have heads.

Entries do not mix, so products of a few entries are made at a time, forward and backward. Masks are given, which may be
smaller, and so are values that are no scores, such as what dropout has drawn.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from ebbtide.rewrites.rule import require
from ebbtide.rewrites.sliced.axes import MIXED_DIMENSION
from ebbtide.rewrites.sliced.regions import Growth
from ebbtide.rewrites.views import seen
from ebbtide.torch_seams.graphs import arguments_of

__all__ = ["Attention"]

_OPENING = frozenset({torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default})


class Attention(Growth):
    """See ``sliced.regions``."""

    rank = 3
    axes = ("entries",)
    whole = "scores of an attention stay whole"

    @classmethod
    def opens(cls, node: fx.Node) -> bool:
        """Whether it is a product that sums over less than it makes, for more entries than one."""
        if node.target not in _OPENING:
            return False
        entries, rows, columns = node.meta["val"].shape
        return entries > 1 and arguments_of(node)[-2].meta["val"].shape[2] < max(rows, columns)

    def makes(self, node: fx.Node) -> bool:
        """Any product of batches."""
        return node.target in _OPENING

    def made_of(self, node: fx.Node) -> list[fx.Node]:
        """Scores that are made of products, as these are."""
        return [each for each in self._large_arguments(node) if self._is_of_products(each)]

    def _is_of_products(self, node: fx.Node) -> bool:
        """Whether some product of batches is behind ``node``, through large values alone."""
        pending, known = [node], {node}
        while pending:
            each = pending.pop()
            if each.op == "call_function" and (each in self.members or self.makes(each)):
                return True
            new = set(self._large_arguments(each)) - known
            pending += new
            known |= new
        return False

    def looks_like_one(self, early: Iterable[fx.Node]) -> bool:
        """Whether there is a softmax, or another op that mixes the keys."""
        return any(each.target in MIXED_DIMENSION for each in self.members)

    def check(self, late: frozenset[fx.Node]) -> None:
        """Raise unless there is a softmax or its like, and a product that reads what it gives."""
        require(self.looks_like_one(()), "there is no op that mixes the keys")
        products = [each for each in self.members if self.makes(each)]
        read = (seen(one, self.rank)[0] for each in products for one in each.all_input_nodes)
        require(self.members.isdisjoint(read), "a product reads them and makes more of them")
        require(bool(self.closing["entries"] - late), "no product reads them in the forward")
        require(len(self._shapes()) <= 1, "they have several shapes")

    def _shapes(self) -> set[tuple[int, ...]]:
        """What stands for the entries, where that is no single dimension."""
        return {tuple(each.meta["val"].shape[:-2]) for each in self.members} - {self.shape[:1]}

    def leading(self, name: str) -> tuple[int, ...]:
        """Sequences and heads, where scores have a dimension for each."""
        (shape,) = self._shapes() or {self.shape[:1]}
        return shape
