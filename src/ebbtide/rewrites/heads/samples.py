"""What is held of a head in the first step where there is no room for all that it stands for (``replaced.Sample``).

1. An op that makes the logits in slices: the logits whole, by the captured product, and each slice held against them.
2. The op that writes the gradient over what was kept: that gradient whole, and the captured products with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ebbtide.rewrites.heads.cuts import clear_unread, spread
from ebbtide.rewrites.heads.facts import HeadSizes, columns_of_logits_hold, logits_by_slices, rows_of_logits_hold
from ebbtide.rewrites.heads.slices import loss_of, tangents_of
from ebbtide.rewrites.replaced import Sample

__all__ = ["head_sample"]

_aten = torch.ops.aten


def head_sample(sizes: HeadSizes, fixed: Mapping[str, Any], kind: str) -> Sample | None:
    """What may be held of one op of a head; ``None`` where none is less than all that the op stands for.

    Args:
        sizes: of the head.
        fixed: the op's arguments by name, as nodes and constants.
        kind: name of the op.
    """
    names = list(fixed)
    if kind == "backward_over_kept":
        plain = sizes.dtype == sizes.softmax and not sizes.logit_ops  # else what is kept are logits
        return _over_kept(sizes, names) if plain else None
    if kind in ("forward_that_keeps", "settle_guess"):  # one has no slices of a product, the other no product
        return None
    axis = "columns" if "columns" in fixed else "rows"
    size: int = fixed[axis]
    hold = columns_of_logits_hold if axis == "columns" else rows_of_logits_hold

    def holds(args: Sequence[Any], _: Callable[[int, Tensor], None]) -> bool:
        own = dict(zip(names, args, strict=True))
        return hold(own["h"], own["wt"], own["bias"], size)

    return Sample(f"{size} {axis} of the logits at a time", logits_by_slices(sizes, axis, size)[1], holds)


def _over_kept(sizes: HeadSizes, names: Sequence[str]) -> Sample:
    """The sample of definition 2; each product's result is taken when it is made."""

    def holds(args: Sequence[Any], take: Callable[[int, Tensor], None]) -> bool:
        own = dict(zip(names, args, strict=True))
        gradient = _gradient(own)
        take(0, torch.mm(gradient, own["wt"].t()))
        if own["trains"]:
            take(1, torch.mm(gradient.t(), own["h"]))
            if own["bias"] is not None:
                take(2, torch.sum(gradient, [0]))
        return True

    needs = sizes.softmax_bytes + max(sizes.hidden_bytes, sizes.weight_bytes) + 2 * sizes.rows * sizes.softmax.itemsize
    return Sample("the gradient of the logits whole", needs, holds)


def _gradient(own: Mapping[str, Any]) -> Tensor:
    """The gradient of the logits, in the memory of that of the log-probabilities."""
    kept, cut, dtype = own["kept"], own["cut"], own["dtype"]
    settings = (own["reduction"], own["ignore_index"], cut, own["class_weights"], own["logit_ops"])
    how = loss_of(own["h"], own["labels"], *settings)
    last = (how.class_weights, how.reduction, how.ignore_index, own["total_weight"])
    gradient = _aten.nll_loss_backward(tangents_of(how, own["tangent"]), kept, how.labels, *last)
    if own["numbers"] is not None:
        numbers = spread(own["numbers"], cut, kept.shape[0], 0.0).unsqueeze(1)
        torch.add(numbers.expand(gradient.shape), gradient, out=gradient)
    _aten._log_softmax_backward_data.out(gradient, kept, 1, dtype, out=gradient)
    return clear_unread(gradient, cut, 0)
