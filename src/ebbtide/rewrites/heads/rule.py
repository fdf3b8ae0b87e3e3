"""The heads of language models as a rule: a form for every linear layer with a cross-entropy (``heads.forms``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from ebbtide.capture.joint import Captured
from ebbtide.capture.origin import source_of
from ebbtide.rewrites.facts import Fact
from ebbtide.rewrites.heads.costs import estimates
from ebbtide.rewrites.heads.find import find_heads, head_at, worthwhile_heads
from ebbtide.rewrites.heads.forms import RULE, facts_of, forms_of, known_count, larger_slices_of, rewritten
from ebbtide.rewrites.heads.kernels import KEPT
from ebbtide.rewrites.heads.ops import HeadOp, op_of
from ebbtide.rewrites.heads.proof import prove_rewritten
from ebbtide.rewrites.replaced import Replaced
from ebbtide.rewrites.rule import Estimate, Rule, Skipped
from ebbtide.step.program import Program
from ebbtide.step.rewrite import Rewrite
from ebbtide.units import format_bytes

__all__ = ["HeadRule"]


class HeadRule(Rule):
    """See ``rewrites.rule``."""

    name = RULE
    writes = frozenset({KEPT})

    def candidates(self, step: Captured) -> Iterator[tuple[Rewrite, ...]]:
        """One form for all heads at a time; a step has one head but in odd models."""
        candidates = zip_longest(*map(forms_of, worthwhile_heads(step)))
        yield from (each for each in dict.fromkeys(candidates) if None not in each)

    def facts(self, step: Captured, rewrite: Rewrite) -> Sequence[Fact]:
        """What the form of its head rests on."""
        return facts_of(head_at(step, rewrite), rewrite)

    def instead(self, step: Captured, rewrite: Rewrite) -> Iterator[Rewrite]:
        """Larger slices."""
        return larger_slices_of(head_at(step, rewrite), rewrite)

    def shape(self, step: Captured, rewrite: Rewrite) -> object:
        """Its form, and how many columns of a gradient are kept by a guess; slices are made in any size."""
        return rewrite.at, rewrite.form, known_count(head_at(step, rewrite), rewrite)

    def rewritten(self, step: Captured, rewrites: Sequence[Rewrite]) -> Captured:
        """One head after the other."""
        for each in rewrites:
            step = rewritten(step, each)
        return step

    def estimates(
        self, step: Captured, rewrites: Sequence[Rewrite], program: Program, after: Captured
    ) -> Mapping[str, Estimate]:
        """The most that each op takes of any head; room for a wrong guess, which a right one does not take."""
        seconds = {op.name: op.seconds for op in program.ops}
        pairs = [(head_at(step, each), each) for each in rewrites]
        known = [estimates(head, each, seconds) for head, each in pairs]

        def estimate(op: HeadOp) -> Estimate:
            found = [each[op.name] for each in known if op.name in each]
            workspace = max(each.workspace_bytes for each in found)
            return Estimate(max(each.seconds for each in found), workspace, op.may_take_more)

        ops = ((node.name, op_of(node.target)) for node in after.op_nodes)
        return {name: estimate(op) for name, op in ops if op is not None}

    def prove(self, step: Captured, after: Captured) -> Sequence[Replaced]:
        """By ``rewrites.heads.proof``."""
        return prove_rewritten(step, after)

    def skipped(self, step: Captured) -> Sequence[Skipped]:
        """What is no head, or so small that it decides nothing."""
        heads, left = find_heads(step)
        worthwhile = worthwhile_heads(step)
        small = ((each.loss, each.sizes.held_bytes) for each in heads if each not in worthwhile)
        says = "it holds {} at most, which decides nothing"
        return [*left, *(Skipped(source_of(loss), says.format(format_bytes(held))) for loss, held in small)]
