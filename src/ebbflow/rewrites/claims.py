"""The walk that proofs of rewrites share: every value of a new graph claims one of the old. Nothing runs.

By induction over the graph:
1. A call that both have claims its like: the same name, target and constants, and arguments that claim the arguments
   of that one.
2. What else is called is one of the rule's own ops, of which the rule says what its results claim.
3. An element of such an op claims the claim of that place; each output of the graph claims the old one.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from ebbflow.capture.joint import Captured
from ebbflow.rewrites.replaced import Replaced, replaced_by
from ebbflow.torch_seams.graphs import arguments_of
from ebbflow.torch_seams.trees import tree_leaves

__all__ = ["Claims", "same"]


class Claims:
    """A proof that ``after`` is ``step`` but for ops of one rule.

    Args:
        step: as it was.
        error: raised with what is wrong.
    """

    def __init__(self, step: Captured, error: type[Exception]) -> None:
        self.step = step
        self.by_name = {node.name: node for node in step.graph.nodes}
        self.claims: dict[fx.Node, Any] = {}  # an old node, or a tuple of them
        self.replaced: list[Replaced] = []
        self._error = error

    def own(self, node: fx.Node) -> tuple[fx.Node, ...] | None:
        """What the results of ``node`` claim, if it is an op of the rule (definition 2)."""
        raise NotImplementedError

    def require(self, holds: bool, what: str) -> None:
        """Raise unless ``holds``."""
        if not holds:
            raise self._error(f"a rewritten step is not what was captured: {what}")

    def walk(self, after: Captured) -> list[Replaced]:
        """What each op of the rule stands for in ``after``."""
        for node in after.graph.nodes:
            self._node(node)
        return self.replaced

    def _node(self, node: fx.Node) -> None:
        if node.op == "output":
            given, wanted = tree_leaves(node.args), list(self.step.outputs)
            self.require(len(given) == len(wanted), "another number of outputs")
            for position, (mine, theirs) in enumerate(zip(given, wanted, strict=True)):
                self.require(same(self._claim(mine), theirs), f"output {position} is another value")
        elif (results := self.own(node)) is not None:
            self.claims[node] = results
            if found := replaced_by(node, self.claims, results, self.step):
                self.replaced.append(found)
        elif node.target is operator.getitem and isinstance(self.claims.get(arguments_of(node)[0]), tuple):
            source, index = arguments_of(node)
            self.claims[node] = self.claims[source][index]
        else:
            self._like(node)

    def _like(self, node: fx.Node) -> None:
        """Definition 1."""
        like = self.by_name.get(node.name)
        self.require(like is not None and (like.op, like.target) == (node.op, node.target), f"{node.name} is new")
        assert like is not None
        given, wanted = tree_leaves((node.args, node.kwargs)), tree_leaves((like.args, like.kwargs))
        alike = len(given) == len(wanted) and all(map(same, map(self._claim, given), wanted))
        self.require(alike, f"{node.name} reads other values")
        self.claims[node] = like

    def _claim(self, value: Any) -> Any:
        return self.claims[value] if isinstance(value, fx.Node) else value


def same(claim: Any, theirs: Any) -> bool:
    """Whether a claim is the old node, or a constant the same."""
    if isinstance(claim, fx.Node) or isinstance(theirs, fx.Node):
        return claim is theirs
    return type(claim) is type(theirs) and (claim == theirs or repr(claim) == repr(theirs))
