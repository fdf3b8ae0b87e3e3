"""What a rewrite rule is: where a step has something to replace, by what, on which facts, and how it is proven.

1. A rule is asked for *candidates*: sets of rewrites that belong together, such as a form for every head of the step.
   One candidate of each rule may be taken, in the order in which rules are applied (``rewrites.choices``); a rule that
   comes later is asked about the step that the earlier ones have made.
2. A *free* rule makes no number twice and reads no more than the captured step does, so that its candidates cost no
   time. Where the captured step does not fit as it is, they need no further reason.
3. A rewrite is plain data (``step.rewrite``): a plan's file brings it back, and the same rule finds its place again.
4. What looks like a place of the rule and is none is *left*, with the reason and what would change that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ebbtide.capture.joint import Captured
from ebbtide.rewrites.facts import Fact
from ebbtide.rewrites.reference import ReferenceOp, parts_of
from ebbtide.rewrites.replaced import Replaced
from ebbtide.step.program import Program
from ebbtide.step.rewrite import Rewrite

__all__ = ["Estimate", "NoPlace", "Rule", "Skipped", "require"]


class NoPlace(Exception):
    """What looks like a place of a rule is none; the message says why (definition 4)."""


def require(holds: bool, why: str) -> None:
    """Raise :class:`NoPlace` unless ``holds``."""
    if not holds:
        raise NoPlace(why)


@dataclass(frozen=True)
class Skipped:
    """A place that looks like one of the rule and is left as it is (definition 4).

    Attributes:
        source: ``file:line`` of what was found, or empty.
        why: it stays as it is.
    """

    source: str
    why: str


@dataclass(frozen=True)
class Estimate:
    """What an op of a rule takes, from what the captured ops take whose place it has.

    Attributes:
        seconds: one run.
        workspace_bytes: beyond its outputs.
        at_least: whether it needs the workspace even where measuring it alone finds less.
    """

    seconds: float
    workspace_bytes: int
    at_least: bool = False


class Rule:
    """One kind of rewrite. All steps that it is given are as captured, or as earlier rules have left them."""

    name: str
    """How rewrites name the rule (``Rewrite.rule``)."""
    free: ClassVar[bool] = False
    """Whether it costs no time (definition 2). Of its candidates, rewrites whose facts do not hold are left out; else
    all of the candidate is."""
    writes: ClassVar[frozenset[str]] = frozenset()
    """Forms that write over what is kept for the backward, for which the graph may not be retained."""

    def candidates(self, step: Captured) -> Iterator[tuple[Rewrite, ...]]:
        """What may be done (definition 1): none of them empty, the one that costs least first."""
        raise NotImplementedError

    def facts(self, step: Captured, rewrite: Rewrite) -> Sequence[Fact]:
        """What ``rewrite`` takes for granted of the kernels; raises ``LookupError`` if the step has not its place."""
        raise NotImplementedError

    def instead(self, step: Captured, rewrite: Rewrite) -> Iterator[Rewrite]:
        """What may stand for ``rewrite`` where a fact of it does not hold, what takes the least memory first."""
        return iter(())

    def shape(self, step: Captured, rewrite: Rewrite) -> object:
        """What ops and buffers come of ``rewrite``: equal for two of which only what their ops take is different."""
        return rewrite

    def rewritten(self, step: Captured, rewrites: Sequence[Rewrite]) -> Captured:
        """``step`` with all of ``rewrites`` in it, which are of one candidate; ``step`` is left as it is."""
        raise NotImplementedError

    def estimates(
        self, step: Captured, rewrites: Sequence[Rewrite], program: Program, after: Captured
    ) -> Mapping[str, Estimate]:
        """For each op of ``after`` that is the rule's own, by its name; ``program`` is that of ``step`` with costs.

        Here, of ops with a reference graph: what its captured ops take, one after the other.
        """
        known = {op.name: op for op in program.ops}
        found: dict[str, Estimate] = {}
        for name, node in ((op.name, node) for op, node in zip(after.program.ops, after.op_nodes, strict=True)):
            parts = parts_of(node.target.reference) if isinstance(node.target, ReferenceOp) else ()
            if name not in known and (ops := [known[each] for each in parts if each in known]):
                workspace = max(each.workspace_bytes for each in ops)
                found[name] = Estimate(sum(each.seconds for each in ops), workspace)
        return found

    def prove(self, step: Captured, after: Captured) -> Sequence[Replaced]:
        """What the ops of the rule stand for in ``after``, which is ``step`` but for them; raises ``RewriteError``."""
        raise NotImplementedError

    def skipped(self, step: Captured) -> Sequence[Skipped]:
        """What looks like a place of the rule and is left as it is (definition 4)."""
        return ()

    def may_lower(self, step: Captured, op: int) -> bool:
        """Whether a candidate of this free rule takes less at op number ``op``, where the step's floor is."""
        return False
