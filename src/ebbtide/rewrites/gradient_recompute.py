"""The rule that makes gradients a second time where they wait for their norm (``in_step.gradient_recompute``).

Its candidates are cuts at several prices of memory: which gradients are kept until the norm is known, and which are
freed and made again, of what. It rests on no fact but that ops give the same bits twice, as all recomputation does; the
first step holds each value of the gradient recompute pass against the fingerprint of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ebbtide.capture.joint import Captured
from ebbtide.optimizer.in_step.gradient_recompute import cut_at, cuts_of, with_recompute_pass
from ebbtide.optimizer.in_step.norm_ops import total_norm_of
from ebbtide.optimizer.in_step.proof import prove_recompute_pass
from ebbtide.rewrites.facts import Fact
from ebbtide.rewrites.replaced import Replaced
from ebbtide.rewrites.rule import Rule
from ebbtide.step.rewrite import Rewrite

__all__ = ["GradientRecomputeRule"]


class GradientRecomputeRule(Rule):
    """Computes gradients once for their norm and once more for the updates, so that not all are kept."""

    name = "gradient-recompute"

    def candidates(self, step: Captured) -> Iterator[tuple[Rewrite, ...]]:
        """One for each cut, that of the fewest ops first."""
        norm = total_norm_of(step)
        for cut in cuts_of(step):
            assert norm is not None
            settings = (("ops", len(cut.again)), ("kept_bytes", cut.kept_bytes), ("price", cut.price))
            yield (Rewrite(self.name, norm.name, "the norm of all gradients", "made again", settings),)

    def facts(self, step: Captured, rewrite: Rewrite) -> Sequence[Fact]:
        """None."""
        norm = total_norm_of(step)
        if norm is None or len(cut_at(step, rewrite["price"]).again) != rewrite["ops"]:
            raise LookupError("the step has no such pass that recomputes its gradients")
        return ()

    def rewritten(self, step: Captured, rewrites: Sequence[Rewrite]) -> Captured:
        """The step with the gradient recompute pass of the one of ``rewrites``."""
        (rewrite,) = rewrites
        return with_recompute_pass(step, cut_at(step, rewrite["price"]))

    def prove(self, step: Captured, after: Captured) -> Sequence[Replaced]:
        """As ``optimizer.in_step.proof`` does; what is made again is held against the fingerprints of the first."""
        prove_recompute_pass(step, after)
        return ()
