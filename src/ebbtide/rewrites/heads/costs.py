"""What the ops of ``heads.kernels`` take, estimated from the captured ops whose place they take.

1. Seconds are sums of those of eager's own ops. A slice of a product takes its share of the product's, or what reading
   the other operand takes, which every slice reads whole; how fast memory is read is told by the log-softmax.
2. Workspace is counted from the kernels' own temporaries, at their longest slice.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ebbtide.rewrites.heads.find import Head
from ebbtide.rewrites.heads.kernels import KEPT
from ebbtide.rewrites.heads.logit_ops import caps
from ebbtide.rewrites.heads.slices import known_columns
from ebbtide.rewrites.rule import Estimate
from ebbtide.rewrites.spans import spans
from ebbtide.step.rewrite import Rewrite

__all__ = ["estimates"]

_SCALARS_BYTES = 4096
"""Bytes of loss, weights and masks of one slice."""


def _longest(length: int, size: int) -> int:
    return max(end - begin for begin, end in spans(length, size))


def _row_bytes(head: Head, rows: int) -> int:
    """Bytes of the three softmax-sized temporaries of a slice of rows."""
    sizes = head.sizes
    per_row = 3 * sizes.softmax.itemsize + (sizes.dtype.itemsize if sizes.dtype != sizes.softmax else 0)
    per_row += _logit_ops_bytes(head)
    return _longest(sizes.rows, rows) * sizes.vocabulary * per_row + _vectors(head)


def _column_bytes(head: Head, columns: int) -> int:
    sizes = head.sizes
    per_row = 3 * sizes.softmax.itemsize + sizes.dtype.itemsize + _logit_ops_bytes(head)
    return (_longest(sizes.vocabulary, columns) + 1) * sizes.rows * per_row + _vectors(head)


def _logit_ops_bytes(head: Head) -> int:
    """Per number of a slice: what the gradients of caps read, and one more while they are made."""
    sizes = head.sizes
    return (caps(sizes.logit_ops) + 1) * sizes.softmax.itemsize if sizes.logit_ops else 0


def _vectors(head: Head) -> int:
    """Bytes of masks and statistics, a few numbers per row."""
    return (80 if head.sizes.cut else 48) * head.sizes.rows + _SCALARS_BYTES


def estimates(head: Head, rewrite: Rewrite, seconds: Mapping[str, float]) -> dict[str, Estimate]:
    """Per op of ``rewrite``, by the last part of its name.

    Args:
        head: of the captured graph.
        rewrite: of it.
        seconds: per captured op, by the name of its node.
    """

    def of(node: fx.Node | None) -> float:
        return 0.0 if node is None else seconds.get(node.name, 0.0)

    product, last = of(head.product), of(head.gradient)
    softmax, cast, loss = of(head.softmax), of(head.cast), of(head.loss)
    backward = of(head.backward) + last + sum(map(of, head.logit_ops_back))
    softmax += sum(map(of, head.logit_ops))  # made again wherever the softmax is
    if head.smoothing is not None:
        loss += of(head.smoothing.sums)
        backward += of(head.smoothing.added)
    hidden, weight, sums = of(head.hidden_gradient), of(head.weight_gradient), of(head.bias_gradient)
    settings = dict(rewrite.settings)
    sizes = head.sizes
    per_byte = of(head.softmax) / (2 * sizes.softmax_bytes) if sizes.softmax_bytes else 0.0
    reading = len(spans(sizes.rows, settings["rows"])) * per_byte * sizes.weight_bytes
    if rewrite.form != KEPT:
        hidden = max(hidden, reading)
    in_rows = product if rewrite.form == KEPT else max(product, reading)
    by_rows = _row_bytes(head, settings["rows"])
    found = {
        "forward_by_rows": Estimate(in_rows + softmax + cast + loss, by_rows),
        "forward_with_guess": Estimate(in_rows + softmax + 2 * cast + loss + backward + hidden, by_rows),
        "forward_that_keeps": Estimate(product + softmax + cast + loss, by_rows),
        "backward_over_kept": Estimate(
            softmax * (cast > 0 or bool(head.logit_ops)) + 2 * cast + backward + hidden + weight + sums, by_rows
        ),
        "backward_by_rows": Estimate(in_rows + softmax + 2 * cast + backward + hidden, by_rows),
        "settle_guess": Estimate(0.0, by_rows),  # a wrong one takes another pass over the rows
    }
    if columns := settings.get("columns", 0):
        by_columns = _column_bytes(head, columns)
        vocabulary = head.sizes.vocabulary
        again_reading = len(spans(sizes.vocabulary, columns)) * per_byte * sizes.hidden_bytes
        again = max(product, again_reading) + softmax + 2 * cast + backward
        weight = max(weight, again_reading)
        share = known_columns(vocabulary, settings.get("percent", 0) / 100, columns) / vocabulary
        found["backward_by_columns"] = Estimate(again + weight + sums, by_columns)
        found["backward_by_other_columns"] = Estimate((1 - share) * again + weight + sums, by_columns)
    return found
