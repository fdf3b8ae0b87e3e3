"""Proofs of rewrites, which also tell what each of their ops stands for (``rewrites.replaced``).

Where an op has a reference graph (``rewrites.reference``), that is walked as the graph around it is:
1. What the op is given claims what it claims outside. Every other node claims the captured call that it copies: the
   same target and constants, and arguments that claim the arguments of that one.
2. No such call draws a random number or has an effect: how often and when they run is the schedule's.
3. That the op has the bits of its reference graph, its rule checks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ebbtide.capture.claims import Claims, Results
from ebbtide.capture.joint import Captured
from ebbtide.capture.traits import draws_random, has_effect
from ebbtide.rewrites.reference import PART, ReferenceOp
from ebbtide.rewrites.replaced import Replaced, Sample, replaced_by
from ebbtide.torch_seams.graphs import arguments_of

__all__ = ["RewriteProof", "prove_references"]


class RewriteProof(Claims):
    """A proof that another graph is ``step`` but for ops of one rule.

    Claims are captured nodes, and elements of captured calls by their place.
    """

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

    def value_of(self, value: Any) -> Any:
        """Elements of a call by their place."""
        if isinstance(value, fx.Node) and value.target is operator.getitem:
            return arguments_of(value)
        return value

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


Check = Callable[[RewriteProof, fx.Node, Mapping[fx.Node, Any]], None]
"""Raises ``RewriteError`` unless the op of a node has the bits of its reference graph, whose nodes claim that."""


def prove_references(step: Captured, after: Captured, kind: type[ReferenceOp], check: Check) -> list[Replaced]:
    """What each op of ``kind`` in ``after`` stands for, which is ``step`` but for these.

    Raises:
        RewriteError: if it is not.
    """
    return _ReferenceProof(step, kind, check).replaced(after)


class _ReferenceProof(RewriteProof):
    def __init__(self, step: Captured, kind: type[ReferenceOp], check: Check) -> None:
        super().__init__(step)
        self.kind, self.check = kind, check

    def of_rule(self, node: fx.Node) -> Any:
        """What its reference graph returns."""
        if not isinstance(node.target, self.kind):
            return None
        claims = self._claims_in(node, node.target.reference)
        self.check(self, node, claims)
        (made,) = node.target.reference.output_node().args
        results = claims[made] if isinstance(made, fx.Node) else Results(claims[each] for each in made)  # type: ignore[union-attr, index]
        self.stands_for(node, results)
        return results

    def _claims_in(self, node: fx.Node, reference: fx.Graph) -> dict[fx.Node, Any]:
        """What the nodes of its reference graph claim (definitions 1 and 2)."""
        given = [self.claim(each) for each in arguments_of(node) if isinstance(each, fx.Node)]
        inputs = reference.find_nodes(op="placeholder")
        self.require(len(given) == len(inputs), f"{node.name} has other arguments")
        claims = dict(zip(inputs, given, strict=True))
        for inner in reference.nodes:
            if inner.target is operator.getitem:
                source, index = arguments_of(inner)
                claims[inner] = claims[source], index
            elif inner.op == "call_function":
                part = self.by_name.get(inner.meta.get(PART, ""))
                alike = part is not None and part.target is inner.target and self.congruent(inner, part, claims)
                self.require(alike, f"{inner.target} in {node.name} is no call of the captured step with its arguments")
                assert part is not None
                self.require(not draws_random(part) and not has_effect(part), f"{part.name} is more than its result")
                claims[inner] = part
        return claims
