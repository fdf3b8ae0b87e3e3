"""A linear layer and the cross-entropy of what it gives, without all of the logits at once: the same bits as eager's.

Eager makes the logits (N x V), their log-softmax and its gradient, of the same size each. Nothing of them is needed
whole, where slices of a product are the rows or columns of the whole product (``heads.facts`` finds out):

1. The log-softmax of a row, and its gradient, are of that row alone. So the loss and the gradient of the hidden states
   (``dh = dlogits @ W``, sums over V) are made from a few rows at a time.
2. The loss sums N numbers in the order of its kernel: it is called once, on a column of the N target log-probabilities.
3. The gradient of the weight sums over N, so rows would split its sums. It is made from a few columns of all rows. The
   log-softmax there is ``(x - max) - log(sum)``, whose two numbers per row the forward keeps; its gradient is the
   kernel's, of the columns and one more that has the target's log-probability and gradient where it lies elsewhere.
4. Where one buffer of N x V may be kept, no product is sliced: the forward keeps the log-softmax (or the logits, where
   these are half as large), and the backward writes the gradient over it, a few rows at a time.
5. The gradient of the hidden states needs the gradient of the loss, which the forward does not know. It may guess: it
   is 1 where the loss is what ``backward()`` is called on. A wrong guess costs another pass over the rows.
6. With smoothed labels the log-probabilities of each row are summed as well, and all classes of a row have one number
   more in the gradient of these. Both are of one row; columns would split the kernel's sum over the gradient, so no
   weight's gradient is made from columns then.
7. What is made of the logits before their softmax, each number for itself (``heads.logit_ops``), is made of slices, and
   so is the gradient of that.

``h`` is N x D, ``wt`` is D x V (a view of the weight), ``bias`` has V elements, ``labels`` as many as ``cut`` leaves of
N (``heads.cuts``). ``dtype`` is that of the softmax; ``reduction`` 0 is none (the loss and its gradient are vectors), 1
the mean, 2 the sum. Sizes of slices are ``rows`` and ``columns``. What the ops do with a slice lies in
``heads.slices``; what is declared of them, in ``heads.ops``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebbtide.rewrites.heads.cuts import read, spread
from ebbtide.rewrites.heads.logit_ops import apply_text, taken_back
from ebbtide.rewrites.heads.ops import HEAD_OPS, declare
from ebbtide.rewrites.heads.slices import (
    TARGET,
    Loss,
    Operands,
    gradient_rows,
    gradients_by_columns,
    loss_and_weight,
    pass_over_rows,
    refuse_other_labels,
    tangents_of,
    targets_of,
)
from ebbtide.rewrites.spans import spans
from ebbtide.torch_seams.autograd import in_backward, keeps_graph

__all__ = ["GUESSED", "HEAD_OPS", "KEPT", "ROWS"]

KEPT, GUESSED, ROWS = "kept", "guessed", "rows"
"""Forms: definitions 4, 5, and neither of them."""
_aten = torch.ops.aten
_OPERANDS = "h wt bias labels"
_LOSS = "reduction ignore_index cut logit_ops"


@declare(
    f"{_OPERANDS} guess {_LOSS} dtype rows count",
    "loss total_weight statistics hidden known",
    lambda given: 1 + (given["guess"] is not None),
)
def forward_by_rows(
    x: Operands, how: Loss, *, guess: Tensor | None, dtype: torch.dtype, rows: int, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, total weight and statistics (definitions 1 and 2).

    The last are by the guess, if there is one: the gradient of ``h``, and ``count`` columns of the logits'.
    """
    refuse_other_labels(how, x.wt.shape[1])
    statistics = torch.empty((3, x.h.shape[0]), dtype=dtype, device=x.h.device)
    total_weight = loss_and_weight(statistics.new_zeros(x.h.shape[0]), how)[1]
    hidden, first = pass_over_rows(x, how, guess, total_weight, dtype, rows, statistics, count)
    return *loss_and_weight(statistics[TARGET], how), statistics, hidden, first


@declare(f"{_OPERANDS} {_LOSS} dtype rows smoothed", "loss total_weight kept row_sums", lambda _: 1)
def forward_that_keeps(
    x: Operands, how: Loss, *, dtype: torch.dtype, rows: int, smoothed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, total weight, and the log-softmax, or the logits where these are not what it reads (definition 4).

    The last are the sums of definition 6, none where labels are not smoothed.
    """
    refuse_other_labels(how, x.wt.shape[1])
    kept = x.logits()
    target = torch.empty(x.h.shape[0], dtype=dtype, device=x.h.device)
    sums = torch.empty(x.h.shape[0] if smoothed else 0, dtype=dtype, device=x.h.device)
    for a, b in spans(x.h.shape[0], rows):
        softmax = _aten._log_softmax(apply_text(how.logit_ops, kept[a:b], dtype)[0], 1, False)
        target[a:b] = targets_of(softmax, how.labels[a:b])
        if smoothed:
            sums[a:b] = torch.sum(softmax, [1])
        if kept.dtype == dtype and not how.logit_ops:
            kept[a:b] = softmax
        del softmax
    return *loss_and_weight(target, how), kept, read(sums, how.cut).contiguous() if smoothed else sums


@declare(  # its traits say that it writes
    f"kept {_OPERANDS} tangent total_weight numbers {_LOSS} dtype rows trains",
    "hidden_gradient weight_gradient bias_gradient",
    lambda given: 1 + given["trains"],
    writes="kept",
)
def backward_over_kept(
    x: Operands,
    how: Loss,
    *,
    kept: Tensor,
    tangent: Tensor,
    total_weight: Tensor,
    numbers: Tensor | None,
    dtype: torch.dtype,
    rows: int,
    trains: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``h``, of the weight (V x D) and of the bias; ``kept`` is written over (definition 4).

    Where the graph is retained, a copy is. ``numbers`` are those of definition 6, or ``None``.
    """
    if in_backward() and keeps_graph():
        kept = kept.clone()
    tangents = tangents_of(how, tangent)
    numbers = None if numbers is None else spread(numbers, how.cut, x.h.shape[0], 0.0)
    for a, b in spans(x.h.shape[0], rows):
        softmax, made = kept[a:b], list[Tensor]()
        if kept.dtype != dtype or how.logit_ops:
            logits, made = apply_text(how.logit_ops, kept[a:b], dtype)
            softmax = _aten._log_softmax(logits, 1, False)
            del logits
        part = gradient_rows(softmax, how, tangents, total_weight, a, b, numbers)
        del softmax
        kept[a:b] = taken_back(how.logit_ops, part, made, kept.dtype)
        del part, made
    hidden, none = torch.mm(kept, x.wt.t()), x.h.new_empty
    if not trains:
        return hidden, none(0), none(0)
    return hidden, torch.mm(kept.t(), x.h), none(0) if x.bias is None else torch.sum(kept, [0], True)


@declare(f"{_OPERANDS} tangent total_weight {_LOSS} dtype rows", "hidden_gradient", lambda _: 2)
def backward_by_rows(
    x: Operands, how: Loss, *, tangent: Tensor, total_weight: Tensor, dtype: torch.dtype, rows: int
) -> Tensor:
    """The gradient of ``h`` (definition 1)."""
    return pass_over_rows(x, how, tangent, total_weight, dtype, rows)[0]


@declare(
    f"hidden guess {_OPERANDS} tangent total_weight {_LOSS} dtype rows",
    "hidden_gradient",
    lambda _: 0,  # where the guess was right
    may_take_more=True,
)
def settle_guess(
    x: Operands,
    how: Loss,
    *,
    hidden: Tensor,
    guess: Tensor,
    tangent: Tensor,
    total_weight: Tensor,
    dtype: torch.dtype,
    rows: int,
) -> Tensor:
    """The gradient of ``h``: ``hidden`` if the guess was right, else made anew (definition 5)."""
    if torch.equal(guess, tangent):
        return hidden.clone()
    return pass_over_rows(x, how, tangent, total_weight, dtype, rows)[0]


@declare(
    f"known guess {_OPERANDS} statistics tangent total_weight {_LOSS} columns",
    "weight_gradient bias_gradient",
    lambda given: 2 - given["known"].shape[1] / given["wt"].shape[1],
)
def backward_by_columns(
    x: Operands,
    how: Loss,
    *,
    known: Tensor,
    guess: Tensor | None,
    statistics: Tensor,
    tangent: Tensor,
    total_weight: Tensor,
    columns: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias (definition 3); the logits' in ``known`` is that where the guess was right."""
    right = guess is not None and known.shape[1] > 0 and torch.equal(guess, tangent)
    return gradients_by_columns(x, how, statistics, tangent, total_weight, known if right else None, columns)
