"""What the ops of ``heads.kernels`` take, estimated from the captured ops whose place they take.

1. Seconds are sums of those of eager's own ops. A slice of a product takes its share of the product's, or what reading
   the other operand takes, which every slice reads whole; how fast memory is read is told by the log-softmax.
2. Workspace is counted from the kernels' own temporaries, at their longest slice.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ebbtide.rewrites.heads.facts import HeadSizes
from ebbtide.rewrites.heads.find import Head
from ebbtide.rewrites.heads.kernels import GUESSED, KEPT
from ebbtide.rewrites.heads.logit_ops import caps
from ebbtide.rewrites.heads.slices import known_columns
from ebbtide.rewrites.rule import Estimate
from ebbtide.rewrites.spans import spans
from ebbtide.step.rewrite import Rewrite

__all__ = ["estimates"]

_SCALARS_BYTES = 4096
"""Bytes of loss, weights and masks of one slice."""


def _slice_bytes(sizes: HeadSizes, logits: int, *, cast: bool) -> int:
    """Bytes of the temporaries of a slice of so many logits, and of masks and statistics, a few numbers per row."""
    each = 3 * sizes.softmax.itemsize + (sizes.dtype.itemsize if cast else 0)
    if sizes.logit_ops:  # what the gradients of caps read, and one more while they are made
        each += (caps(sizes.logit_ops) + 1) * sizes.softmax.itemsize
    return logits * each + (80 if sizes.cut else 48) * sizes.rows + _SCALARS_BYTES


def _longest(length: int, size: int) -> int:
    return max(end - begin for begin, end in spans(length, size))


def estimates(head: Head, rewrite: Rewrite, seconds: Mapping[str, float]) -> dict[str, Estimate]:
    """Per op of ``rewrite``, by the last part of its name.

    Args:
        head: of the captured graph.
        rewrite: of it.
        seconds: per captured op, by the name of its node.
    """

    def of(*nodes: fx.Node | None) -> float:
        return sum(seconds.get(node.name, 0.0) for node in nodes if node is not None)

    sizes, settings = head.sizes, dict(rewrite.settings)
    product, steps, steps_back = of(head.product), of(*head.steps), of(*head.steps_back)
    loss = of(head.loss, head.row_sums)
    hidden, weight = of(head.hidden_gradient), of(head.weight_gradient, head.bias_gradient)
    per_byte = of(head.steps[-1]) / (2 * sizes.softmax_bytes) if sizes.softmax_bytes else 0.0
    by_rows = _slice_bytes(
        sizes, _longest(sizes.rows, settings["rows"]) * sizes.vocabulary, cast=sizes.dtype != sizes.softmax
    )
    if rewrite.form == KEPT:
        again = steps if len(head.steps) > 1 else 0.0  # the log-softmax is kept where it reads the product itself
        return {
            "forward_that_keeps": Estimate(product + steps + loss, by_rows),
            "backward_over_kept": Estimate(again + steps_back + hidden + weight, by_rows),
        }
    reading = len(spans(sizes.rows, settings["rows"])) * per_byte * sizes.weight_bytes
    forward = max(product, reading) + steps
    backward = forward + steps_back + max(hidden, reading)
    found = {
        "forward_by_rows": Estimate((backward if rewrite.form == GUESSED else forward) + loss, by_rows),
        "backward_by_rows": Estimate(backward, by_rows),
        "settle_guess": Estimate(0.0, by_rows),  # a wrong one takes another pass over the rows
    }
    if columns := settings.get("columns", 0):
        reading = len(spans(sizes.vocabulary, columns)) * per_byte * sizes.hidden_bytes
        known = known_columns(sizes.vocabulary, settings.get("percent", 0) / 100, columns) / sizes.vocabulary
        again = (1 - known) * (max(product, reading) + steps + steps_back)
        by_columns = _slice_bytes(sizes, (_longest(sizes.vocabulary, columns) + 1) * sizes.rows, cast=True)
        found["backward_by_columns"] = Estimate(again + max(weight, reading), by_columns)
    return found
