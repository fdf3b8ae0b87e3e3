"""The walk that proofs of changed graphs share: every value of the new graph claims one of the old. Nothing runs.

By induction over the graph:
1. A call that both have claims its like: the same name, target and constants, and arguments that claim the arguments
   of that one.
2. What else is called is one of the change's own ops, of which the change says what its results claim.
3. An element of such an op claims the claim of that place; each output of the graph claims the old one.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.errors import InternalError
from ebbtide.torch_seams.graphs import arguments_of
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["Claims", "Results", "RewriteError", "same"]


class RewriteError(InternalError):
    """A changed graph is not the captured one but for what its changes say. Nothing of it has run."""


class Results(tuple[Any, ...]):
    """What the results of an op of several claim, by their places."""


class Claims:
    """A proof that another graph is ``step`` but for ops of one change.

    A claim is a node of ``step``, or whatever else :meth:`value_of` makes of one.

    Args:
        step: as it was.
        what: the changed step, in the words of errors.
    """

    def __init__(self, step: Captured, what: str = "a rewritten step") -> None:
        self.step = step
        self.by_name = {node.name: node for node in step.graph.nodes}
        self.claims: dict[fx.Node, Any] = {}
        self._what = what

    # -- what a change says of its own ----------------------------------------------------------------------------

    def own(self, node: fx.Node) -> Any:
        """What ``node`` claims if it is an op of the change (definition 2), else ``None``."""
        return None

    def like_of(self, node: fx.Node) -> fx.Node | None:
        """The old node that ``node`` is the like of, if there is one: that of its name."""
        return self.by_name.get(node.name)

    def other(self, node: fx.Node, like: fx.Node | None) -> Any:
        """What ``node`` claims, which is neither of the change nor called as ``like`` is; nothing is allowed here."""
        self.require(like is not None and (like.op, like.target) == (node.op, node.target), f"{node.name} is new")
        raise self.wrong(f"{node.name} reads other values")

    def value_of(self, value: Any) -> Any:
        """An old node, or a constant, as what is claimed of it."""
        return value

    # -- the walk -------------------------------------------------------------------------------------------------

    def require(self, holds: bool, what: str) -> None:
        """Raise :class:`RewriteError` unless ``holds``."""
        if not holds:
            raise self.wrong(what)

    def wrong(self, what: str) -> RewriteError:
        """What to raise where the changed step does otherwise."""
        return RewriteError(f"{self._what} is not what was captured: {what}")

    def walk(self, after: Captured) -> None:
        """Every node of ``after``, in order."""
        for node in after.graph.nodes:
            if node.op == "output":
                self.output(node)
            else:
                self.claims[node] = self._claim_of(node)

    def output(self, node: fx.Node) -> None:
        """Check what the graph returns (definition 3)."""
        self.outputs_are(tree_leaves(node.args), list(self.step.outputs))

    def outputs_are(self, outputs: list[Any], wanted: list[Any]) -> None:
        """Raise unless what is given claims what is wanted, one by one."""
        self.require(len(outputs) == len(wanted), "another number of outputs")
        for position, (mine, theirs) in enumerate(zip(outputs, wanted, strict=True)):
            self.require(same(self.claim(mine), self.value_of(theirs)), f"output {position} is another value")

    def claim(self, value: Any) -> Any:
        """What a new node claims; a constant is itself, and so is a node that comes later, which is no old value."""
        return self.claims.get(value, value) if isinstance(value, fx.Node) else value

    def congruent(self, node: fx.Node, like: fx.Node, claims: Mapping[fx.Node, Any]) -> bool:
        """Whether ``node`` has the constants of ``like``, and arguments that claim its arguments."""
        given, wanted = tree_leaves((node.args, node.kwargs)), tree_leaves((like.args, like.kwargs))
        return len(given) == len(wanted) and all(
            same(claims.get(mine, mine) if isinstance(mine, fx.Node) else mine, self.value_of(theirs))
            for mine, theirs in zip(given, wanted, strict=True)
        )

    def _claim_of(self, node: fx.Node) -> Any:
        if (claim := self.own(node)) is not None:
            return claim
        if node.target is operator.getitem and isinstance(self.claims.get(arguments_of(node)[0]), Results):
            source, index = arguments_of(node)
            return self.claims[source][index]
        like = self.like_of(node)
        if like is None or (like.op, like.target) != (node.op, node.target):
            return self.other(node, like)
        return self.value_of(like) if self.congruent(node, like, self.claims) else self.other(node, like)


def same(claim: Any, theirs: Any) -> bool:
    """Whether a claim is of the same old value, or a constant the same."""
    if isinstance(claim, fx.Node | tuple) or isinstance(theirs, fx.Node | tuple):
        return claim is theirs or claim == theirs
    return type(claim) is type(theirs) and (claim == theirs or repr(claim) == repr(theirs))
