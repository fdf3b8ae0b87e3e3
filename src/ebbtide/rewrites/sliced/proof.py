"""What proofs of calls in slices share: each call does what its parts do, to a slice of what they are given.

1. The call names old ops, its *parts*. Its graph calls each as the old graph does, with the same constants and
   arguments that claim those of the old op; what it has made itself it may read through views.
2. No part draws a random number or has an effect.
3. That a slice of a part's result is made of slices, and which, each kind of call has to show; so too that its results
   may be put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import fx

from ebbtide.capture.claims import Results, same
from ebbtide.capture.traits import draws_random, has_effect
from ebbtide.rewrites.sliced.calls import InSlices
from ebbtide.rewrites.sliced.places import PARTS
from ebbtide.rewrites.stand_ins import StandIns
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["SliceProof", "SlicedProof"]


class SlicedProof(StandIns):
    """A proof that another graph is ``step`` but for calls of one kind."""

    kind: ClassVar[type[SliceProof]]

    def own(self, node: fx.Node) -> Results | None:
        """What the results of a call in slices claim."""
        if not isinstance(node.target, self.kind.calls):
            return None
        results = self.kind(self, node, node.target).results()
        self.stands_for(node, results)
        return results


class SliceProof:
    """Definitions 1 to 3 of one call.

    Attributes:
        claims: of nodes of its graph, old nodes.
        own: what it has made, and views of that.
    """

    calls: ClassVar[type[InSlices]]
    """Its kind of call."""
    view: ClassVar[object]
    """What it calls to see otherwise what it has made."""

    def __init__(self, proof: StandIns, node: fx.Node, target: InSlices) -> None:
        self.proof, self.node, self.target = proof, node, target
        self.require = proof.require
        size, *self.given = node.args
        self.require(type(size) is int and size > 0, f"{node.name} has slices of {size}")
        self.claims: dict[fx.Node, fx.Node] = {}
        self.own: set[fx.Node] = set()

    # -- what a kind of call has to show (definition 3) -----------------------------------------------------------

    def how(self) -> Sequence[Any]:
        """How the call says that it is given its tensors."""
        raise NotImplementedError

    def give(self, inner: fx.Node, how: Any) -> None:
        """Take up what is given."""
        raise NotImplementedError

    def see(self, inner: fx.Node) -> None:
        """Take up a view of what the call has made, which claims what that does."""
        raise NotImplementedError

    def is_read(self, mine: fx.Node, theirs: Any) -> bool:
        """Whether ``mine``, of its own, is a slice of what the old step reads as ``theirs``."""
        raise NotImplementedError

    def arguments(self, part: fx.Node) -> list[Any]:
        """All of an old op, as a slice has them."""
        return tree_leaves((part.args, part.kwargs))

    def place(self, inner: fx.Node, part: fx.Node) -> None:
        """Show that ``inner`` makes a slice of ``part``'s result, and take up which."""
        raise NotImplementedError

    def put_together(self, made: Sequence[fx.Node]) -> None:
        """Show that slices of ``made`` make whole results."""
        raise NotImplementedError

    # -- the walk -------------------------------------------------------------------------------------------------

    def results(self) -> Results:
        """What the call's results claim."""
        pending = list(self.node.meta[PARTS])
        inputs = [each for each in self.target.graph.nodes if each.op == "placeholder"]
        how = self.how()
        self.require(len(inputs) == len(self.given) == len(how), f"{self.node.name} has other arguments")
        for inner, outer, each in zip(inputs, self.given, how, strict=True):
            self.require(isinstance(outer, fx.Node), f"{self.node.name} is given {outer}")
            self.claims[inner] = self.proof.claim(outer)
            self.give(inner, each)
        for inner in self.target.graph.nodes:
            if inner.op == "output":
                self.require(not pending, f"{self.node.name} leaves out {pending}")
                return self._returned(inner)
            if inner.op == "placeholder":
                continue
            if inner.target is self.view:
                self.see(inner)
            else:
                self.require(bool(pending), f"{inner} is no part")
                self._part(inner, pending.pop(0))
            self.own.add(inner)
        raise AssertionError("a graph without an output")

    def _part(self, inner: fx.Node, name: str) -> None:
        """Definitions 1 and 2."""
        part = self.proof.by_name.get(name)
        alike = part is not None and part.op == "call_function" and part.target is inner.target
        self.require(alike, f"{inner} is not {name}")
        assert part is not None
        self.require(not draws_random(part) and not has_effect(part), f"{name} is more than its result")
        given, wanted = tree_leaves((inner.args, inner.kwargs)), self.arguments(part)
        self.require(len(given) == len(wanted), f"{inner} has other arguments than {name}")
        for mine, theirs in zip(given, wanted, strict=True):
            if not isinstance(mine, fx.Node):
                self.require(same(mine, theirs), f"{inner} has other constants than {name}")
            else:
                alike = self.is_read(mine, theirs) if mine in self.own else self.claims[mine] is theirs
                self.require(alike, f"{inner} reads other values than {name}")
        self.place(inner, part)
        self.claims[inner] = part

    def _returned(self, inner: fx.Node) -> Results:
        (made,) = inner.args
        self.require(isinstance(made, tuple) and bool(made), f"{self.node.name} returns {made}")
        for each in made:  # type: ignore[union-attr]
            own = each in self.own and each.target is not self.view  # type: ignore[union-attr]
            self.require(own, f"{self.node.name} returns {each}")
        self.put_together(made)  # type: ignore[arg-type]
        return Results(self.claims[each] for each in made)  # type: ignore[union-attr, index]
