"""Proofs of rewrites, which also tell what each of their ops stands for (``rewrites.replaced``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from ebbtide.capture.claims import Claims
from ebbtide.capture.joint import Captured
from ebbtide.rewrites.replaced import Replaced, Sample, replaced_by

__all__ = ["RewriteProof"]


class RewriteProof(Claims):
    """A proof that another graph is ``step`` but for ops of one rule."""

    def __init__(self, step: Captured, what: str = "a rewritten step") -> None:
        super().__init__(step, what)
        self._replaced: list[Replaced] = []

    def stands_for(self, node: fx.Node, results: Iterable[Any], sample: Sample | None = None) -> None:
        """That ``node`` takes the place of what ``results`` claim."""
        if found := replaced_by(node, self.claims, results, self.step, sample):
            self._replaced.append(found)

    def replaced(self, after: Captured) -> list[Replaced]:
        """What each op of the rule stands for in ``after``.

        Raises:
            RewriteError: if it is not ``step`` but for them.
        """
        self.walk(after)
        return self._replaced
