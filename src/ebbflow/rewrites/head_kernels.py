"""A linear layer and the cross-entropy of what it gives, without all of the logits at once: the same bits as eager's.

Eager makes the logits (N x V), their log-softmax and its gradient, of the same size each. Nothing of them is needed
whole, where slices of a product are the rows or columns of the whole product (``rewrites.facts`` finds out):

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
7. On request the gradient of the weight is added up from rows, which definition 3 is there to avoid: its last bits are
   other ones than eager's. All other results are eager's.

``h`` is N x D, ``wt`` is D x V (a view of the weight), ``bias`` has V elements, ``labels`` as many as ``cut`` leaves of
N (``head_cuts``). ``dtype`` is that of the softmax; ``reduction`` 0 is none (the loss and its gradient are vectors), 1
the mean, 2 the sum. Sizes of slices are ``rows`` and ``columns``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ebbflow.rewrites.head_cuts import clear_unread, read, spread
from ebbflow.rewrites.spans import spans
from ebbflow.torch_seams.autograd import in_backward, keeps_graph
from ebbflow.torch_seams.graphs import ASSERTS_TRUE

__all__ = [
    "GUESSED",
    "KEPT",
    "NAMESPACE",
    "OVERWRITES",
    "ROWS",
    "SETTLES",
    "SUMMED",
    "known_columns",
    "loss_of",
    "sum_of_rows",
    "tangents_of",
]

NAMESPACE = "ebbflow_rewrites"
KEPT, GUESSED, ROWS, SUMMED = "kept", "guessed", "rows", "summed"
"""Forms: definitions 4, 5, neither of them, and 7."""
OVERWRITES = f"{NAMESPACE}.backward_over_kept.default"
"""Target of the op that writes over its first argument, or over a copy where the graph is retained."""
SETTLES = f"{NAMESPACE}.settle_guess.default"
"""Target of the op that takes more where a guess was wrong than when it is measured alone."""

_aten = torch.ops.aten
_IGNORED = -100  # in the column of definition 2, where all other targets are 0
MAX, LOG_SUM, TARGET = 0, 1, 2
"""Rows of ``statistics``: the largest logit, minus the logarithm of the sum, the target's log-probability."""


# -- what several of them do --------------------------------------------------------------------------------------


def _logits(h: Tensor, wt: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(h, wt) if bias is None else torch.addmm(bias, h, wt)


def _softmax_rows(h: Tensor, wt: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The log-softmax of some rows."""
    return _aten._log_softmax(_logits(h, wt, bias).to(dtype), 1, False)


class _Loss(NamedTuple):
    """How a head's loss is made of its labels, spread over all rows."""

    labels: Tensor
    reduction: int
    ignore_index: int
    cut: Sequence[int]


def loss_of(h: Tensor, labels: Tensor, reduction: int, ignore_index: int, cut: Sequence[int]) -> _Loss:
    """Rows that are not read are as ignored ones."""
    return _Loss(spread(labels, cut, h.shape[0], ignore_index), reduction, ignore_index, cut)


def tangents_of(how: _Loss, tangent: Tensor) -> Tensor:
    """One for all rows, or one for each."""
    return tangent if how.reduction else spread(tangent, how.cut, how.labels.shape[0], 0.0)


def _classes(how: _Loss) -> Tensor:
    """Labels of definition 2."""
    return torch.where(how.labels == how.ignore_index, _IGNORED, 0)


def _loss(target: Tensor, how: _Loss) -> tuple[Tensor, Tensor]:
    """Loss and total weight, from the log-probabilities of all rows' targets."""
    column, classes = read(target, how.cut).unsqueeze(1), read(_classes(how), how.cut)
    return _aten.nll_loss_forward(column, classes, None, how.reduction, _IGNORED)


def _gradient_rows(
    softmax: Tensor,
    how: _Loss,
    tangents: Tensor,
    total_weight: Tensor,
    a: int,
    b: int,
    numbers: Tensor | None = None,
) -> Tensor:
    """The gradient of the logits of rows ``a`` to ``b``, in the type of the softmax; ``numbers`` by definition 6."""
    tangent = tangents if how.reduction else tangents[a:b]
    gradient = _aten.nll_loss_backward(
        tangent, softmax, how.labels[a:b], None, how.reduction, how.ignore_index, total_weight
    )
    if numbers is not None:
        torch.add(numbers[a:b].unsqueeze(1).expand(gradient.shape), gradient, out=gradient)
    return clear_unread(_aten._log_softmax_backward_data(gradient, softmax, 1, softmax.dtype), how.cut, a)


def _refuse_other_labels(labels: Tensor, classes: int, ignore_index: int) -> None:
    """Refuse labels that are no class, as the loss does on all of the logits.

    Raises:
        IndexError: on a CPU; on a card an assertion fails there.
    """
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= classes))
    if labels.device.type == "cpu":
        if wrong.any():
            raise IndexError(f"Target {int(labels[wrong][0])} is out of bounds.")
    else:
        ASSERTS_TRUE(~wrong.any())


def _targets(softmax: Tensor, labels: Tensor) -> Tensor:
    """Of some rows, the log-probability of each label; of one that is ignored, anything."""
    return softmax.gather(1, labels.clamp(0, softmax.shape[1] - 1).unsqueeze(1)).squeeze(1)


def _statistics(logits: Tensor, softmax: Tensor, labels: Tensor) -> Tensor:
    largest, where = logits.max(1)
    log_sum = softmax.gather(1, where.unsqueeze(1)).squeeze(1)
    return torch.stack([largest, log_sum, _targets(softmax, labels)])


def _hidden_gradient(
    h: Tensor,
    wt: Tensor,
    bias: Tensor | None,
    how: _Loss,
    tangent: Tensor,
    total_weight: Tensor,
    dtype: torch.dtype,
    rows: int,
) -> Tensor:
    gradient = torch.empty_like(h, memory_format=torch.contiguous_format)
    tangents = tangents_of(how, tangent)
    for a, b in spans(h.shape[0], rows):
        softmax = _softmax_rows(h[a:b], wt, bias, dtype)
        part = _gradient_rows(softmax, how, tangents, total_weight, a, b)
        del softmax
        torch.mm(part.to(h.dtype), wt.t(), out=gradient[a:b])
        del part
    return gradient


def _gradient_columns(
    h: Tensor,
    wt: Tensor,
    bias: Tensor | None,
    how: _Loss,
    statistics: Tensor,
    at_target: Tensor,
    begin: int,
    end: int,
) -> Tensor:
    """Of all rows, the gradient of the logits from ``begin`` to ``end`` (definition 3), in the type of ``h``."""
    width = end - begin
    softmax = statistics.new_empty((h.shape[0], width + 1))
    softmax[:, :width] = _logits(h, wt[:, begin:end], None if bias is None else bias[begin:end])
    softmax[:, :width].sub_(statistics[MAX].unsqueeze(1)).add_(statistics[LOG_SUM].unsqueeze(1))
    labels = how.labels
    inside = (labels >= begin) & (labels < end)
    softmax[:, width] = torch.where(inside, float("-inf"), statistics[TARGET])
    gradient = torch.zeros_like(softmax)
    gradient.scatter_(1, torch.where(inside, labels - begin, width).unsqueeze(1), at_target)
    whole = _aten._log_softmax_backward_data(gradient, softmax, 1, softmax.dtype)
    del gradient, softmax
    return clear_unread(whole, how.cut, 0)[:, :width].to(h.dtype)


def _gradients_by_columns(
    h: Tensor,
    wt: Tensor,
    bias: Tensor | None,
    how: _Loss,
    statistics: Tensor,
    tangent: Tensor,
    total_weight: Tensor,
    known: Tensor | None,
    columns: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of weight (V x D) and bias; ``known`` are the first columns of the gradient of the logits."""
    column, tangents = statistics[TARGET].unsqueeze(1), tangents_of(how, tangent)
    at_target = _aten.nll_loss_backward(tangents, column, _classes(how), None, how.reduction, _IGNORED, total_weight)
    weight = h.new_empty((wt.shape[1], h.shape[1]))
    sums = h.new_empty((0 if bias is None else wt.shape[1],))
    for a, b in spans(wt.shape[1], columns):
        if known is not None and b <= known.shape[1]:
            part = known[:, a:b]
        else:
            part = _gradient_columns(h, wt, bias, how, statistics, at_target, a, b)
        torch.mm(part.t(), h, out=weight[a:b])
        if bias is not None:
            torch.sum(part, [0], out=sums[a:b])
        del part
    return weight, sums


def sum_of_rows(whole: Tensor, part: Tensor, h: Tensor) -> None:
    """Add to ``whole``, in the type of the softmax, what some rows give to the gradient of the weight."""
    if whole.dtype == h.dtype:
        whole.addmm_(part.t(), h)
    else:
        whole.add_(torch.mm(part.t(), h))


def known_columns(length: int, share: float, columns: int) -> int:
    """How many of the first columns lie in slices that end within ``share`` of them."""
    return max((end for _, end in spans(length, columns) if end <= share * length), default=0)


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
    dtype: torch.dtype,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, total weight and statistics (definitions 1 and 2)."""
    _refuse_other_labels(labels, wt.shape[1], ignore_index)
    how = loss_of(h, labels, reduction, ignore_index, cut)
    statistics = torch.empty((3, h.shape[0]), dtype=dtype, device=h.device)
    for a, b in spans(h.shape[0], rows):
        logits = _logits(h[a:b], wt, bias).to(dtype)
        softmax = _aten._log_softmax(logits, 1, False)
        statistics[:, a:b] = _statistics(logits, softmax, how.labels[a:b])
        del logits, softmax
    loss, total_weight = _loss(statistics[TARGET], how)
    return loss, total_weight, statistics


def _losses(h: Tensor, labels: Tensor, reduction: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Loss and total weight, without numbers."""
    return h.new_empty((labels.shape[0],) if reduction == 0 else (), dtype=dtype), h.new_empty((), dtype=dtype)


@forward_by_rows.register_fake
def _(h, wt, bias, labels, reduction, ignore_index, cut, dtype, rows):  # type: ignore[no-untyped-def]
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
    dtype: torch.dtype,
    rows: int,
    known: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, total weight, statistics; by the guess, the gradient of ``h`` and ``known`` columns of the logits'."""
    _refuse_other_labels(labels, wt.shape[1], ignore_index)
    how = loss_of(h, labels, reduction, ignore_index, cut)
    statistics = torch.empty((3, h.shape[0]), dtype=dtype, device=h.device)
    hidden = torch.empty_like(h, memory_format=torch.contiguous_format)
    first = h.new_empty((h.shape[0], known))
    total_weight = _loss(statistics.new_zeros(h.shape[0]), how)[1]
    tangents = tangents_of(how, guess)
    for a, b in spans(h.shape[0], rows):
        logits = _logits(h[a:b], wt, bias).to(dtype)
        softmax = _aten._log_softmax(logits, 1, False)
        statistics[:, a:b] = _statistics(logits, softmax, how.labels[a:b])
        del logits
        part = _gradient_rows(softmax, how, tangents, total_weight, a, b)
        del softmax
        part = part.to(h.dtype)
        torch.mm(part, wt.t(), out=hidden[a:b])
        first[a:b] = part[:, :known]
        del part
    loss, total_weight = _loss(statistics[TARGET], how)
    return loss, total_weight, statistics, hidden, first


@forward_with_guess.register_fake
def _(h, wt, bias, labels, guess, reduction, ignore_index, cut, dtype, rows, known):  # type: ignore[no-untyped-def]
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
    dtype: torch.dtype,
    rows: int,
    smoothed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, total weight, and the log-softmax, or the logits where these have another type (definition 4).

    The last are the sums of definition 6, none where labels are not smoothed.
    """
    _refuse_other_labels(labels, wt.shape[1], ignore_index)
    how = loss_of(h, labels, reduction, ignore_index, cut)
    kept = _logits(h, wt, bias)
    target = torch.empty(h.shape[0], dtype=dtype, device=h.device)
    sums = torch.empty(h.shape[0] if smoothed else 0, dtype=dtype, device=h.device)
    for a, b in spans(h.shape[0], rows):
        softmax = _aten._log_softmax(kept[a:b].to(dtype), 1, False)
        target[a:b] = _targets(softmax, how.labels[a:b])
        if smoothed:
            sums[a:b] = torch.sum(softmax, [1])
        if kept.dtype == dtype:
            kept[a:b] = softmax
        del softmax
    loss, total_weight = _loss(target, how)
    return loss, total_weight, kept, read(sums, cut).contiguous() if smoothed else sums


@forward_that_keeps.register_fake
def _(h, wt, bias, labels, reduction, ignore_index, cut, dtype, rows, smoothed):  # type: ignore[no-untyped-def]
    sums = h.new_empty((labels.shape[0] if smoothed else 0,), dtype=dtype)
    return *_losses(h, labels, reduction, dtype), h.new_empty((h.shape[0], wt.shape[1])), sums


@torch.library.custom_op(f"{NAMESPACE}::backward_over_kept", mutates_args=())  # capture.traits says that it writes
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
    dtype: torch.dtype,
    rows: int,
    trains: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``h``, of the weight (V x D) and of the bias; ``kept`` is written over (definition 4).

    Where the graph is retained, a copy is. ``numbers`` are those of definition 6, or ``None``.
    """
    if in_backward() and keeps_graph():
        kept = kept.clone()
    how = loss_of(h, labels, reduction, ignore_index, cut)
    tangents = tangents_of(how, tangent)
    numbers = None if numbers is None else spread(numbers, cut, h.shape[0], 0.0)
    for a, b in spans(h.shape[0], rows):
        softmax = kept[a:b] if kept.dtype == dtype else _aten._log_softmax(kept[a:b].to(dtype), 1, False)
        kept[a:b] = _gradient_rows(softmax, how, tangents, total_weight, a, b, numbers)
        del softmax
    hidden = torch.mm(kept, wt.t())
    if not trains:
        return hidden, h.new_empty((0,)), h.new_empty((0,))
    sums = h.new_empty((0,)) if bias is None else torch.sum(kept, [0])
    return hidden, torch.mm(kept.t(), h), sums


@backward_over_kept.register_fake
def _(kept, h, wt, bias, labels, tangent, total_weight, numbers, reduction, ignore_index, cut, dtype, rows, trains):  # type: ignore[no-untyped-def]
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
    dtype: torch.dtype,
    rows: int,
) -> Tensor:
    """The gradient of ``h`` (definition 1)."""
    how = loss_of(h, labels, reduction, ignore_index, cut)
    return _hidden_gradient(h, wt, bias, how, tangent, total_weight, dtype, rows)


@torch.library.custom_op(f"{NAMESPACE}::backward_in_sums", mutates_args=())
def backward_in_sums(
    h: Tensor,
    wt: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    tangent: Tensor,
    total_weight: Tensor,
    reduction: int,
    ignore_index: int,
    cut: Sequence[int],
    dtype: torch.dtype,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``h``, of the weight (V x D) and of the bias, the last two by definition 7."""
    how = loss_of(h, labels, reduction, ignore_index, cut)
    tangents = tangents_of(how, tangent)
    hidden = torch.empty_like(h, memory_format=torch.contiguous_format)
    weight = torch.zeros((wt.shape[1], h.shape[1]), dtype=dtype, device=h.device)
    sums = torch.zeros((0 if bias is None else wt.shape[1],), dtype=dtype, device=h.device)
    for a, b in spans(h.shape[0], rows):
        softmax = _softmax_rows(h[a:b], wt, bias, dtype)
        part = _gradient_rows(softmax, how, tangents, total_weight, a, b).to(h.dtype)
        del softmax
        torch.mm(part, wt.t(), out=hidden[a:b])
        sum_of_rows(weight, part, h[a:b])
        if bias is not None:
            sums.add_(torch.sum(part, [0]))
        del part
    return hidden, weight.to(h.dtype), sums.to(h.dtype)


@backward_in_sums.register_fake
def _(h, wt, bias, *_: object):  # type: ignore[no-untyped-def]
    return torch.empty_like(h, memory_format=torch.contiguous_format), *_two(h, wt, bias)


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
    dtype: torch.dtype,
    rows: int,
) -> Tensor:
    """The gradient of ``h``: ``hidden`` if the guess was right, else made anew (definition 5)."""
    if torch.equal(guess, tangent):
        return hidden.clone()
    how = loss_of(h, labels, reduction, ignore_index, cut)
    return _hidden_gradient(h, wt, bias, how, tangent, total_weight, dtype, rows)


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
    columns: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of weight (V x D) and bias (definition 3)."""
    how = loss_of(h, labels, reduction, ignore_index, cut)
    return _gradients_by_columns(h, wt, bias, how, statistics, tangent, total_weight, None, columns)


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
    columns: int,
) -> tuple[Tensor, Tensor]:
    """The same where the first columns of the logits' gradient are known if the guess was right."""
    first = known if torch.equal(guess, tangent) else None
    how = loss_of(h, labels, reduction, ignore_index, cut)
    return _gradients_by_columns(h, wt, bias, how, statistics, tangent, total_weight, first, columns)


def _two(h: Tensor, wt: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return h.new_empty((wt.shape[1], h.shape[1])), h.new_empty((0 if bias is None else wt.shape[1],))


@backward_by_columns.register_fake
def _(h, wt, bias, *_: object):  # type: ignore[no-untyped-def]
    return _two(h, wt, bias)


@backward_by_other_columns.register_fake
def _(known, guess, h, wt, bias, *_: object):  # type: ignore[no-untyped-def]
    return _two(h, wt, bias)
