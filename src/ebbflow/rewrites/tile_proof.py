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

from typing import Any

import torch
from torch import fx

from ebbflow.capture.joint import Captured
from ebbflow.capture.traits import draws_random, has_effect
from ebbflow.rewrites.claims import Claims, same
from ebbflow.rewrites.heads import SAME_ORDER
from ebbflow.rewrites.proof import RewriteError
from ebbflow.rewrites.replaced import Replaced
from ebbflow.rewrites.tile_places import PARTS
from ebbflow.rewrites.tiled import Tiled
from ebbflow.torch_seams.dispatcher import OpOverload, is_pointwise
from ebbflow.torch_seams.graphs import arguments_of
from ebbflow.torch_seams.trees import tree_leaves

__all__ = ["prove_tiled"]

_aten = torch.ops.aten


def prove_tiled(step: Captured, after: Captured) -> list[Replaced]:
    """What each tile in ``after`` stands for, which is ``step`` but for them.

    Raises:
        RewriteError: if it is not.
    """
    return _Proof(step, RewriteError).walk(after)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RewriteError(f"a step in slices is not what was captured: {what}")


class _Proof(Claims):
    def own(self, node: fx.Node) -> tuple[fx.Node, ...] | None:
        return _Slice(self, node, node.target).results() if isinstance(node.target, Tiled) else None


class _Slice:
    """Definitions 2 to 5 for one of them."""

    def __init__(self, proof: _Proof, node: fx.Node, target: Tiled) -> None:
        self.proof, self.node, self.target = proof, node, target
        size, *self.given = node.args
        _require(type(size) is int and size > 0, f"{node.name} has slices of {size}")
        self.claims: dict[fx.Node, fx.Node] = {}
        self.cuts: dict[fx.Node, int | None] = {}
        self.own: set[fx.Node] = set()  # what it has made, and transposed views of that
        self.length: int | None = None

    def results(self) -> tuple[fx.Node, ...]:
        """What the tile's results claim."""
        pending = list(self.node.meta[PARTS])
        inputs = [each for each in self.target.graph.nodes if each.op == "placeholder"]
        _require(len(inputs) == len(self.given) == len(self.target.inputs), f"{self.node.name} has other arguments")
        for inner, outer, cut in zip(inputs, self.given, self.target.inputs, strict=True):
            self._given(inner, outer, cut)
        _require(self.length is not None, f"{self.node.name} cuts nothing")
        made: tuple[fx.Node, ...] = ()
        for inner in self.target.graph.nodes:
            if inner.op == "output":
                _require(not pending, f"{self.node.name} leaves out {pending}")
                made = self._output(inner)
            elif inner.op != "placeholder" and inner.target is _aten.t.default:
                self._flipped(inner)
            elif inner.op != "placeholder":
                _require(bool(pending), f"{inner} is no part")
                self._part(inner, pending.pop(0))
        return made

    def _given(self, inner: fx.Node, outer: Any, cut: int | None) -> None:
        """Definition 3a."""
        _require(isinstance(outer, fx.Node), f"{self.node.name} is given {outer}")
        claim = self.proof.claims[outer]
        self.claims[inner], self.cuts[inner] = claim, cut
        if cut is not None:
            self._is_long(claim, cut)

    def _is_long(self, claim: fx.Node, cut: int) -> None:
        length = claim.meta["val"].shape[cut]
        _require(self.length in (None, length), f"{claim.name} is cut along another axis than the rest")
        self.length = length

    def _flipped(self, inner: fx.Node) -> None:
        """Definition 3d; it claims no node, and is seen through by the part that reads it."""
        (source,) = arguments_of(inner)
        _require(source in self.own, f"{inner} transposes what is given")
        cut = self.cuts[source]
        assert cut is not None
        self.claims[inner], self.cuts[inner] = self.claims[source], 1 - cut
        self.own.add(inner)

    def _part(self, inner: fx.Node, name: str) -> None:
        part = self.proof.by_name.get(name)
        _require(
            part is not None and part.op == "call_function" and part.target is inner.target, f"{inner} is not {name}"
        )
        assert part is not None
        _require(not draws_random(part) and not has_effect(part), f"{name} is more than its result")
        given, wanted = tree_leaves((inner.args, inner.kwargs)), tree_leaves((part.args, part.kwargs))
        _require(len(given) == len(wanted), f"{inner} has other arguments than {name}")
        for mine, theirs in zip(given, wanted, strict=True):
            if not isinstance(mine, fx.Node):
                _require(same(mine, theirs), f"{inner} has other constants than {name}")
            elif mine in self.own:
                flipped = mine.target is _aten.t.default
                _require(not flipped or theirs.target is _aten.t.default, f"{inner} reads {mine} transposed")
                seen = _seen_through(arguments_of(theirs)[0] if flipped else theirs)
                _require(seen is self.claims[mine], f"{inner} reads other values than {name}")
            else:
                _require(self.claims[mine] is theirs, f"{inner} reads other values than {name}")
        self.claims[inner], self.cuts[inner] = part, self._cut_of(inner, part)
        self.own.add(inner)

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
            _require(bias == (None if cut == 0 else dims - 1) and dims == 1, f"{part.name} adds what is cut otherwise")
            return cut
        if part.target is _aten.sum.dim_IntList:
            whole = list(arguments_of(part)[1]) == [0] and part.meta["val"].dim() == 2
            _require(cuts == [1] and whole, f"{part.name} sums what is cut")
            return 1
        elementwise = isinstance(part.target, OpOverload) and is_pointwise(part.target)
        _require(elementwise or part.target is _aten._to_copy.default, f"{part.name} is not elementwise")
        columns = part.meta["val"].shape[-1]
        found: set[int | None] = set()
        for each, cut in zip(tensors, cuts, strict=True):
            value = self.claims[each].meta["val"]
            if value.dim() == 0:
                _require(cut is None, f"{part.name} reads a number in slices")
                continue
            same = value.shape[-1] == columns and value.numel() == part.meta["val"].numel() and value.is_contiguous()
            _require(same and each in self.own, f"{part.name} reads what has another layout")
            found.add(cut)
        _require(len(found) == 1 and None not in found, f"{part.name} reads slices of different axes")
        _require(part.meta["val"].is_contiguous(), f"{part.name} is laid out otherwise")
        cut = found.pop()
        assert cut is not None
        return cut

    def _product_cut(self, part: fx.Node, first: int | None, second: int | None) -> int:
        _require((first, second) in ((0, None), (None, 1)), f"{part.name} would sum over slices")
        return 0 if first == 0 else 1

    def _output(self, inner: fx.Node) -> tuple[fx.Node, ...]:
        """Definition 5."""
        (made,) = inner.args
        _require(isinstance(made, tuple) and len(made) == len(self.target.outputs), f"{self.node.name} returns {made}")
        for each, cut in zip(made, self.target.outputs, strict=True):  # type: ignore[arg-type]
            _require(each in self.own and each.target is not _aten.t.default, f"{self.node.name} returns {each}")
            _require(self.cuts[each] == cut, f"{self.node.name} puts {each} together along another dimension")
            value = self.claims[each].meta["val"]
            _require(value.dim() == 2 and value.is_contiguous(), f"{self.node.name} returns {each} laid out otherwise")
            self._is_long(self.claims[each], cut)
        return tuple(self.claims[each] for each in made)  # type: ignore[union-attr]


def _seen_through(node: fx.Node) -> fx.Node:
    """Definition 2."""
    while node.target in SAME_ORDER:
        (node, *_) = arguments_of(node)
    return node
