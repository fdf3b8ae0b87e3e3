"""Proofs of rewrites, which also tell what each of their ops stands for (``rewrites.replaced``).

Where the op of a rule runs a graph of its own (:class:`CallProof`):
1. It names old ops, its *parts*. Its graph calls one after the other, and views between them; what the call is given
   claims what it claims outside. How a part is called and what a view is, the rule says.
2. No part draws a random number or has an effect: how often and when they run is the schedule's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from ebbtide.capture.claims import Claims, Results, same
from ebbtide.capture.joint import Captured
from ebbtide.capture.traits import draws_random, has_effect
from ebbtide.rewrites.replaced import Replaced, Sample, replaced_by
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["PARTS", "CallProof", "RewriteProof"]

PARTS = "ebbtide_parts"
"""Key in the meta of a call's node: the names of its parts."""


class RewriteProof(Claims):
    """A proof that another graph is ``step`` but for ops of one rule."""

    def __init__(self, step: Captured, what: str = "a rewritten step") -> None:
        super().__init__(step, what)
        self._replaced: list[Replaced] = []

    def of_rule(self, node: fx.Node) -> Any:
        """What ``node`` claims if it is an op of the rule, else ``None``."""
        raise NotImplementedError

    def own(self, node: fx.Node) -> Any:
        """What an op of the rule claims; one that was there before, of that name and target, is as any other."""
        like = self.like_of(node)
        return None if like is not None and like.target is node.target else self.of_rule(node)

    def stands_for(self, node: fx.Node, results: Any, sample: Sample | None = None) -> None:
        """That ``node`` takes the place of what ``results`` claim."""
        claims = results if isinstance(results, list | Results) else [results]
        if found := replaced_by(node, self.claims, claims, self.step, sample):
            self._replaced.append(found)

    def replaced(self, after: Captured) -> list[Replaced]:
        """What each op of the rule stands for in ``after``.

        Raises:
            RewriteError: if it is not ``step`` but for them.
        """
        self.walk(after)
        return self._replaced


class CallProof:
    """The proof of one call (definitions 1 and 2).

    Args:
        proof: of the graph that it is in.
        node: the call.
        graph: that it runs.
        given: what it runs it on.

    Attributes:
        parts: old ops.
        claims: of nodes of its graph.
    """

    def __init__(self, proof: RewriteProof, node: fx.Node, graph: fx.Graph, given: Sequence[Any]) -> None:
        self.proof, self.node, self.graph, self.given = proof, node, graph, given
        self.require = proof.require
        self.parts = [self._part_named(name) for name in node.meta[PARTS]]
        self.claims: dict[fx.Node, Any] = {}

    def is_view(self, inner: fx.Node) -> bool:
        """Whether ``inner`` is a view that the rule allows; if so, take up what it claims."""
        raise NotImplementedError

    def call(self, inner: fx.Node, part: fx.Node) -> None:
        """Raise ``RewriteError`` unless ``inner`` does what ``part`` does."""
        raise NotImplementedError

    def returned(self, made: Any) -> Any:
        """What the results of the call claim, which are ``made``."""
        raise NotImplementedError

    def results(self) -> Any:
        """What the results of the call claim."""
        given, pending = iter(self.given), [*self.parts]
        for inner in self.graph.nodes:
            if inner.op == "placeholder":
                outer = next(given, None)
                self.require(isinstance(outer, fx.Node), f"{self.node.name} is given {outer}")
                self.claims[inner] = self.proof.claim(outer)
            elif inner.op == "output":
                complete = not pending and next(given, None) is None
                self.require(complete, f"{self.node.name} leaves out a part or an argument")
                return self.returned(inner.args[0])
            elif not self.is_view(inner):
                self.require(bool(pending), f"{inner} is no part")
                part = pending.pop(0)
                self.call(inner, part)
                self.claims[inner] = part
        raise AssertionError("a graph without an output")

    def pairs(self, inner: fx.Node, part: fx.Node, mine: Any, theirs: Any) -> Iterator[tuple[fx.Node, Any]]:
        """Arguments of ``inner`` with those of ``part``, where these are no constants, which have to be the same."""
        given, wanted = tree_leaves(mine), tree_leaves(theirs)
        self.require(len(given) == len(wanted), f"{inner} has other arguments than {part}")
        for one, other in zip(given, wanted, strict=True):
            if isinstance(one, fx.Node):
                yield one, other
            else:
                self.require(same(one, other), f"{inner} has other constants than {part}")

    def _part_named(self, name: str) -> fx.Node:
        part = self.proof.by_name.get(name)
        self.require(part is not None and part.op == "call_function", f"{self.node.name} has a part {name}")
        assert part is not None
        self.require(not draws_random(part) and not has_effect(part), f"{name} is more than its result")
        return part
