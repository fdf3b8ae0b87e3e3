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
7. Where classes have weights, the loss of a row and its gradient are multiplied by the weight of its label. The sums
   are those of the kernel, taken apart: over the products, and over the weights, by which a mean is divided.
8. What is made of the logits before their softmax, each number for itself (``heads.logit_ops``), is made of slices, and
   so is the gradient of that.

``h`` is N x D, ``wt`` is D x V (a view of the weight), ``bias`` has V elements, ``labels`` as many as ``cut`` leaves of
N (``heads.cuts``); ``class_weights`` are V numbers or ``None``. ``dtype`` is that of the softmax; ``reduction`` 0 is
none (the loss and its gradient are vectors), 1 the mean, 2 the sum. Sizes of slices are ``rows`` and ``columns``. What
the ops do with a slice lies in ``heads.slices``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ebbtide.rewrites.heads.cuts import read, spread
from ebbtide.rewrites.heads.logit_ops import apply_text, taken_back
from ebbtide.rewrites.heads.slices import (
    TARGET,
    gradient_rows,
    gradients_by_columns,
    hidden_gradient,
    logits_of,
    loss_and_weight,
    loss_of,
    refuse_other_labels,
    statistics_of,
    tangents_of,
    targets_of,
)
from ebbtide.rewrites.spans import spans
from ebbtide.step.op_traits import NAMESPACE
from ebbtide.torch_seams.autograd import in_backward, keeps_graph

__all__ = ["GUESSED", "KEPT", "ROWS"]

KEPT, GUESSED, ROWS = "kept", "guessed", "rows"
"""Forms: definitions 4, 5, and neither of them."""
_aten = torch.ops.aten


# -- the ops ------------------------------------------------------------------------------------------------------


@torch.library.custom_op(f"{NAMESPACE}::forward_by_rows", mutates_args=())
def forward_by_rows(
    h: Tensor,
    wt: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    reduction: int,
    ignore_index: int,
    cut: Sequence[int],
    class_weights: Tensor | None,
    logit_ops: str,
    dtype: torch.dtype,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, total weight and statistics (definitions 1 and 2)."""
    refuse_other_labels(labels, wt.shape[1], ignore_index)
    how = loss_of(h, labels, reduction, ignore_index, cut, class_weights, logit_ops)
    statistics = torch.empty((3, h.shape[0]), dtype=dtype, device=h.device)
    for a, b in spans(h.shape[0], rows):
        logits = apply_text(how.logit_ops, logits_of(h[a:b], wt, bias), dtype)[0]
        softmax = _aten._log_softmax(logits, 1, False)
        statistics[:, a:b] = statistics_of(logits, softmax, how.labels[a:b])
        del logits, softmax
    loss, total_weight = loss_and_weight(statistics[TARGET], how)
    return loss, total_weight, statistics


def _losses(h: Tensor, labels: Tensor, reduction: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Loss and total weight, without numbers."""
    return h.new_empty((labels.shape[0],) if reduction == 0 else (), dtype=dtype), h.new_empty((), dtype=dtype)


@forward_by_rows.register_fake
def _(h, wt, bias, labels, reduction, ignore_index, cut, class_weights, logit_ops, dtype, rows):  # type: ignore[no-untyped-def]
    return *_losses(h, labels, reduction, dtype), h.new_empty((3, h.shape[0]), dtype=dtype)


@torch.library.custom_op(f"{NAMESPACE}::forward_with_guess", mutates_args=())
def forward_with_guess(
    h: Tensor,
    wt: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    guess: Tensor,
    reduction: int,
    ignore_index: int,
    cut: Sequence[int],
    class_weights: Tensor | None,
    logit_ops: str,
    dtype: torch.dtype,
    rows: int,
    known: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, total weight, statistics; by the guess, the gradient of ``h`` and ``known`` columns of the logits'."""
    refuse_other_labels(labels, wt.shape[1], ignore_index)
    how = loss_of(h, labels, reduction, ignore_index, cut, class_weights, logit_ops)
    statistics = torch.empty((3, h.shape[0]), dtype=dtype, device=h.device)
    hidden = torch.empty_like(h, memory_format=torch.contiguous_format)
    first = h.new_empty((h.shape[0], known))
    total_weight = loss_and_weight(statistics.new_zeros(h.shape[0]), how)[1]
    tangents = tangents_of(how, guess)
    for a, b in spans(h.shape[0], rows):
        logits, made = apply_text(how.logit_ops, logits_of(h[a:b], wt, bias), dtype)
        softmax = _aten._log_softmax(logits, 1, False)
        statistics[:, a:b] = statistics_of(logits, softmax, how.labels[a:b])
        del logits
        part = gradient_rows(softmax, how, tangents, total_weight, a, b)
        del softmax
        part = taken_back(how.logit_ops, part, made, h.dtype)
        torch.mm(part, wt.t(), out=hidden[a:b])
        first[a:b] = part[:, :known]
        del part, made
    loss, total_weight = loss_and_weight(statistics[TARGET], how)
    return loss, total_weight, statistics, hidden, first


@forward_with_guess.register_fake
def _(h, wt, bias, labels, guess, reduction, ignore_index, cut, class_weights, logit_ops, dtype, rows, known):  # type: ignore[no-untyped-def]
    statistics = h.new_empty((3, h.shape[0]), dtype=dtype)
    hidden = torch.empty_like(h, memory_format=torch.contiguous_format)
    return *_losses(h, labels, reduction, dtype), statistics, hidden, h.new_empty((h.shape[0], known))


@torch.library.custom_op(f"{NAMESPACE}::forward_that_keeps", mutates_args=())
def forward_that_keeps(
    h: Tensor,
    wt: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    reduction: int,
    ignore_index: int,
    cut: Sequence[int],
    class_weights: Tensor | None,
    logit_ops: str,
    dtype: torch.dtype,
    rows: int,
    smoothed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, total weight, and the log-softmax, or the logits where these are not what it reads (definition 4).

    The last are the sums of definition 6, none where labels are not smoothed.
    """
    refuse_other_labels(labels, wt.shape[1], ignore_index)
    how = loss_of(h, labels, reduction, ignore_index, cut, class_weights, logit_ops)
    kept = logits_of(h, wt, bias)
    target = torch.empty(h.shape[0], dtype=dtype, device=h.device)
    sums = torch.empty(h.shape[0] if smoothed else 0, dtype=dtype, device=h.device)
    for a, b in spans(h.shape[0], rows):
        softmax = _aten._log_softmax(apply_text(logit_ops, kept[a:b], dtype)[0], 1, False)
        target[a:b] = targets_of(softmax, how.labels[a:b])
        if smoothed:
            sums[a:b] = torch.sum(softmax, [1])
        if kept.dtype == dtype and not logit_ops:
            kept[a:b] = softmax
        del softmax
    loss, total_weight = loss_and_weight(target, how)
    return loss, total_weight, kept, read(sums, cut).contiguous() if smoothed else sums


@forward_that_keeps.register_fake
def _(h, wt, bias, labels, reduction, ignore_index, cut, class_weights, logit_ops, dtype, rows, smoothed):  # type: ignore[no-untyped-def]
    sums = h.new_empty((labels.shape[0] if smoothed else 0,), dtype=dtype)
    return *_losses(h, labels, reduction, dtype), h.new_empty((h.shape[0], wt.shape[1])), sums


@torch.library.custom_op(f"{NAMESPACE}::backward_over_kept", mutates_args=())  # its traits say that it writes
def backward_over_kept(
    kept: Tensor,
    h: Tensor,
    wt: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    tangent: Tensor,
    total_weight: Tensor,
    numbers: Tensor | None,
    reduction: int,
    ignore_index: int,
    cut: Sequence[int],
    class_weights: Tensor | None,
    logit_ops: str,
    dtype: torch.dtype,
    rows: int,
    trains: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``h``, of the weight (V x D) and of the bias; ``kept`` is written over (definition 4).

    Where the graph is retained, a copy is. ``numbers`` are those of definition 6, or ``None``.
    """
    if in_backward() and keeps_graph():
        kept = kept.clone()
    how = loss_of(h, labels, reduction, ignore_index, cut, class_weights, logit_ops)
    tangents = tangents_of(how, tangent)
    numbers = None if numbers is None else spread(numbers, cut, h.shape[0], 0.0)
    for a, b in spans(h.shape[0], rows):
        softmax, made = kept[a:b], list[Tensor]()
        if kept.dtype != dtype or logit_ops:
            logits, made = apply_text(logit_ops, kept[a:b], dtype)
            softmax = _aten._log_softmax(logits, 1, False)
            del logits
        part = gradient_rows(softmax, how, tangents, total_weight, a, b, numbers)
        del softmax
        kept[a:b] = taken_back(logit_ops, part, made, kept.dtype)
        del part, made
    hidden = torch.mm(kept, wt.t())
    if not trains:
        return hidden, h.new_empty((0,)), h.new_empty((0,))
    sums = h.new_empty((0,)) if bias is None else torch.sum(kept, [0])
    return hidden, torch.mm(kept.t(), h), sums


@backward_over_kept.register_fake
def _(kept, h, wt, bias, *others):  # type: ignore[no-untyped-def]
    trains = others[-1]
    hidden = torch.empty_like(h, memory_format=torch.contiguous_format)
    if not trains:
        return hidden, h.new_empty((0,)), h.new_empty((0,))
    return hidden, h.new_empty((wt.shape[1], h.shape[1])), h.new_empty((0 if bias is None else wt.shape[1],))


@torch.library.custom_op(f"{NAMESPACE}::backward_by_rows", mutates_args=())
def backward_by_rows(
    h: Tensor,
    wt: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    tangent: Tensor,
    total_weight: Tensor,
    reduction: int,
    ignore_index: int,
    cut: Sequence[int],
    class_weights: Tensor | None,
    logit_ops: str,
    dtype: torch.dtype,
    rows: int,
) -> Tensor:
    """The gradient of ``h`` (definition 1)."""
    how = loss_of(h, labels, reduction, ignore_index, cut, class_weights, logit_ops)
    return hidden_gradient(h, wt, bias, how, tangent, total_weight, dtype, rows)


@torch.library.custom_op(f"{NAMESPACE}::settle_guess", mutates_args=())
def settle_guess(
    hidden: Tensor,
    guess: Tensor,
    h: Tensor,
    wt: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    tangent: Tensor,
    total_weight: Tensor,
    reduction: int,
    ignore_index: int,
    cut: Sequence[int],
    class_weights: Tensor | None,
    logit_ops: str,
    dtype: torch.dtype,
    rows: int,
) -> Tensor:
    """The gradient of ``h``: ``hidden`` if the guess was right, else made anew (definition 5)."""
    if torch.equal(guess, tangent):
        return hidden.clone()
    how = loss_of(h, labels, reduction, ignore_index, cut, class_weights, logit_ops)
    return hidden_gradient(h, wt, bias, how, tangent, total_weight, dtype, rows)


@backward_by_rows.register_fake
def _(h, *_: object):  # type: ignore[no-untyped-def]
    return torch.empty_like(h, memory_format=torch.contiguous_format)


@settle_guess.register_fake
def _(hidden, *_: object):  # type: ignore[no-untyped-def]
    return torch.empty_like(hidden)


@torch.library.custom_op(f"{NAMESPACE}::backward_by_columns", mutates_args=())
def backward_by_columns(
    h: Tensor,
    wt: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    statistics: Tensor,
    tangent: Tensor,
    total_weight: Tensor,
    reduction: int,
    ignore_index: int,
    cut: Sequence[int],
    class_weights: Tensor | None,
    logit_ops: str,
    columns: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of weight (V x D) and bias (definition 3)."""
    how = loss_of(h, labels, reduction, ignore_index, cut, class_weights, logit_ops)
    return gradients_by_columns(h, wt, bias, how, statistics, tangent, total_weight, None, columns)


@torch.library.custom_op(f"{NAMESPACE}::backward_by_other_columns", mutates_args=())
def backward_by_other_columns(
    known: Tensor,
    guess: Tensor,
    h: Tensor,
    wt: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    statistics: Tensor,
    tangent: Tensor,
    total_weight: Tensor,
    reduction: int,
    ignore_index: int,
    cut: Sequence[int],
    class_weights: Tensor | None,
    logit_ops: str,
    columns: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias; the first columns of the logits' gradient are known if the guess was right."""
    first = known if torch.equal(guess, tangent) else None
    how = loss_of(h, labels, reduction, ignore_index, cut, class_weights, logit_ops)
    return gradients_by_columns(h, wt, bias, how, statistics, tangent, total_weight, first, columns)


def _two(h: Tensor, wt: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return h.new_empty((wt.shape[1], h.shape[1])), h.new_empty((0 if bias is None else wt.shape[1],))


@backward_by_columns.register_fake
def _(h, wt, bias, *_: object):  # type: ignore[no-untyped-def]
    return _two(h, wt, bias)


@backward_by_other_columns.register_fake
def _(known, guess, h, wt, bias, *_: object):  # type: ignore[no-untyped-def]
    return _two(h, wt, bias)
