"""What is held of a head in the first step where there is no room for all that it stands for (``replaced.Sample``).

1. An op that makes the logits in slices: the logits whole, by the captured product, and each slice held against them.
2. The op that writes the gradient over what was kept: that gradient whole, and the captured products with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ebbtide.rewrites.heads.cuts import spread
from ebbtide.rewrites.heads.facts import HeadSizes, all_equal, logits_by_slices, logits_in_slices
from ebbtide.rewrites.heads.ops import HeadOp
from ebbtide.rewrites.heads.slices import Operands, gradient_over, loss_of, tangents_of
from ebbtide.rewrites.replaced import Sample

__all__ = ["head_sample"]


def head_sample(sizes: HeadSizes, op: HeadOp, fixed: Mapping[str, Any]) -> Sample | None:
    """What may be held of one op of a head; ``None`` where none is less than all that the op stands for.

    Args:
        sizes: of the head.
        op: of it.
        fixed: its arguments by name, as nodes and constants.
    """
    if op.name == "backward_over_kept":
        plain = sizes.dtype == sizes.softmax and not sizes.logit_ops  # else what is kept are logits
        return _over_kept(sizes, op) if plain else None
    if op.name in ("forward_that_keeps", "settle_guess"):  # one has no slices of a product, the other no product
        return None
    axis = "columns" if "columns" in fixed else "rows"
    size: int = fixed[axis]

    def holds(args: Sequence[Any], _: Callable[[int, Tensor], None]) -> bool:
        own = op.by_name(args)
        return all_equal(logits_in_slices(Operands(own["h"], own["wt"], own["bias"]), axis, size))

    return Sample(f"{size} {axis} of the logits at a time", logits_by_slices(sizes, axis, size)[1], holds)


def _over_kept(sizes: HeadSizes, op: HeadOp) -> Sample:
    """The sample of definition 2; each product's result is taken when it is made."""

    def holds(args: Sequence[Any], take: Callable[[int, Tensor], None]) -> bool:
        own = op.by_name(args)
        settings = (own["reduction"], own["ignore_index"], own["cut"], own["logit_ops"])
        how, rows = loss_of(own["h"].shape[0], own["labels"], *settings), own["h"].shape[0]
        numbers = None if own["numbers"] is None else spread(own["numbers"], own["cut"], rows, 0.0)
        gradient = gradient_over(own["kept"], how, tangents_of(how, own["tangent"]), own["total_weight"], numbers)
        take(0, torch.mm(gradient, own["wt"].t()))
        if own["trains"]:
            take(1, torch.mm(gradient.t(), own["h"]))
            if own["bias"] is not None:
                take(2, torch.sum(gradient, [0]))
        return True

    needs = sizes.softmax_bytes + max(sizes.hidden_bytes, sizes.weight_bytes) + 2 * sizes.rows * sizes.softmax.itemsize
    return Sample("the gradient of the logits whole", needs, holds)
