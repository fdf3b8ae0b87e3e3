"""What the ops of ``heads.kernels`` do with slices of a head; its definitions are cited here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ebbtide.rewrites.heads.cuts import clear_unread, read, spread
from ebbtide.rewrites.heads.logit_ops import apply_text, taken_back
from ebbtide.rewrites.spans import spans
from ebbtide.torch_seams.graphs import ASSERTS_TRUE

__all__ = [
    "LOG_SUM",
    "MAX",
    "TARGET",
    "Loss",
    "Operands",
    "gradient_of_columns",
    "gradient_over",
    "gradient_rows",
    "gradients_by_columns",
    "known_columns",
    "loss_and_weight",
    "loss_of",
    "pass_over_rows",
    "refuse_other_labels",
    "statistics_of",
    "tangents_of",
    "target_gradients",
    "targets_of",
]

_aten = torch.ops.aten
_IGNORED = -100  # in the column of definition 2, where all other targets are 0
MAX, LOG_SUM, TARGET = 0, 1, 2
"""Rows of ``statistics``: the largest logit, minus the logarithm of the sum, the target's log-probability."""


class Operands(NamedTuple):
    """What the product of a head reads: ``h`` is N x D, ``wt`` is D x V, ``bias`` has V elements or is ``None``."""

    h: Tensor
    wt: Tensor
    bias: Tensor | None

    def logits(self, out: Tensor | None = None) -> Tensor:
        """The product, in ``out`` if that is given."""
        if self.bias is None:
            return torch.mm(self.h, self.wt, out=out)
        return torch.addmm(self.bias, self.h, self.wt, out=out)

    def rows(self, a: int, b: int) -> Operands:
        """What makes rows ``a`` to ``b`` of the logits."""
        return Operands(self.h[a:b], self.wt, self.bias)

    def columns(self, a: int, b: int) -> Operands:
        """What makes columns ``a`` to ``b`` of the logits."""
        return Operands(self.h, self.wt[:, a:b], None if self.bias is None else self.bias[a:b])


class Loss(NamedTuple):
    """How a head's loss is made of its logits and labels, spread over all rows.

    Attributes:
        labels: N; rows that are not read are as ignored ones.
        reduction: as in the ops, and so are ``ignore_index`` and ``cut``.
        logit_ops: as in the ops.
    """

    labels: Tensor
    reduction: int
    ignore_index: int
    cut: Sequence[int]
    logit_ops: str


def loss_of(rows: int, labels: Tensor, reduction: int, ignore_index: int, cut: Sequence[int], logit_ops: str) -> Loss:
    """The loss of an op of ``rows`` rows with these arguments."""
    return Loss(spread(labels, cut, rows, ignore_index), reduction, ignore_index, cut, logit_ops)


def tangents_of(how: Loss, tangent: Tensor) -> Tensor:
    """One for all rows, or one for each."""
    return tangent if how.reduction else spread(tangent, how.cut, how.labels.shape[0], 0.0)


def _classes(how: Loss) -> Tensor:
    """Labels of definition 2."""
    return torch.where(how.labels == how.ignore_index, _IGNORED, 0)


def loss_and_weight(target: Tensor, how: Loss) -> tuple[Tensor, Tensor]:
    """Loss and total weight, from the log-probabilities of all rows' targets."""
    column, classes = read(target, how.cut).unsqueeze(1), read(_classes(how), how.cut)
    return _aten.nll_loss_forward(column, classes, None, how.reduction, _IGNORED)


def target_gradients(target: Tensor, how: Loss, tangents: Tensor, total_weight: Tensor) -> Tensor:
    """The gradients of the targets' log-probabilities, N x 1, from these (definition 3)."""
    column = target.unsqueeze(1)
    return _aten.nll_loss_backward(tangents, column, _classes(how), None, how.reduction, _IGNORED, total_weight)


def gradient_rows(
    softmax: Tensor,
    how: Loss,
    tangents: Tensor,
    total_weight: Tensor,
    a: int,
    b: int,
    numbers: Tensor | None = None,
) -> Tensor:
    """That of what the softmax of rows ``a`` to ``b`` reads, in its type; ``numbers`` by definition 6."""
    gradient = _of_softmax(softmax, how, tangents, total_weight, a, b, numbers)
    return clear_unread(_aten._log_softmax_backward_data(gradient, softmax, 1, softmax.dtype), how.cut, a)


def gradient_over(softmax: Tensor, how: Loss, tangents: Tensor, total_weight: Tensor, numbers: Tensor | None) -> Tensor:
    """That of all rows, in the memory of the gradient of the log-probabilities."""
    gradient = _of_softmax(softmax, how, tangents, total_weight, 0, softmax.shape[0], numbers)
    _aten._log_softmax_backward_data.out(gradient, softmax, 1, softmax.dtype, out=gradient)
    return clear_unread(gradient, how.cut, 0)


def _of_softmax(
    softmax: Tensor, how: Loss, tangents: Tensor, total_weight: Tensor, a: int, b: int, numbers: Tensor | None
) -> Tensor:
    """The gradient of the log-probabilities of rows ``a`` to ``b``."""
    tangent = tangents if how.reduction else tangents[a:b]
    gradient = _aten.nll_loss_backward(
        tangent, softmax, how.labels[a:b], None, how.reduction, how.ignore_index, total_weight
    )
    if numbers is not None:
        torch.add(numbers[a:b].unsqueeze(1).expand(gradient.shape), gradient, out=gradient)
    return gradient


def refuse_other_labels(how: Loss, classes: int) -> None:
    """Refuse labels that are no class, as the loss does on all of the logits.

    Raises:
        IndexError: on a CPU; on a card an assertion fails there.
    """
    labels = how.labels
    wrong = (labels != how.ignore_index) & ((labels < 0) | (labels >= classes))
    if labels.device.type == "cpu":
        if wrong.any():
            raise IndexError(f"Target {int(labels[wrong][0])} is out of bounds.")
    else:
        ASSERTS_TRUE(~wrong.any())


def targets_of(softmax: Tensor, labels: Tensor) -> Tensor:
    """The log-probability of each label of some rows; of one that is ignored, anything."""
    return softmax.gather(1, labels.clamp(0, softmax.shape[1] - 1).unsqueeze(1)).squeeze(1)


def statistics_of(logits: Tensor, softmax: Tensor, labels: Tensor) -> Tensor:
    """What definition 3 needs of some rows."""
    largest, where = logits.max(1)
    log_sum = softmax.gather(1, where.unsqueeze(1)).squeeze(1)
    return torch.stack([largest, log_sum, targets_of(softmax, labels)])


def pass_over_rows(
    x: Operands,
    how: Loss,
    tangent: Tensor | None,
    total_weight: Tensor,
    dtype: torch.dtype,
    rows: int,
    statistics: Tensor | None = None,
    count: int = 0,
) -> tuple[Tensor, Tensor]:
    """The gradient of ``h``, and ``count`` columns of the logits', from a few rows at a time (definition 1).

    Without a ``tangent`` there are none; ``statistics`` are filled in where they are given.
    """
    hidden = x.h.new_empty(0 if tangent is None else x.h.shape)
    first = x.h.new_empty((x.h.shape[0], count))
    tangents = None if tangent is None else tangents_of(how, tangent)
    for a, b in spans(x.h.shape[0], rows):
        logits, made = apply_text(how.logit_ops, x.rows(a, b).logits(), dtype)
        softmax = _aten._log_softmax(logits, 1, False)
        if statistics is not None:
            statistics[:, a:b] = statistics_of(logits, softmax, how.labels[a:b])
        del logits
        if tangents is not None:
            part = gradient_rows(softmax, how, tangents, total_weight, a, b)
            del softmax
            part = taken_back(how.logit_ops, part, made, x.h.dtype)
            torch.mm(part, x.wt.t(), out=hidden[a:b])
            first[a:b] = part[:, :count]
            del part
        made, softmax = [], None  # before the next ones are made
    return hidden, first


def gradient_of_columns(softmax: Tensor, labels: Tensor, target: Tensor, at_target: Tensor, begin: int) -> Tensor:
    """The gradient of what the softmax of some columns reads, and of one column more (definition 3).

    Args:
        softmax: the log-softmax of all rows from column ``begin`` on, and one column, which is filled here.
        labels: of the rows.
        target: their log-probabilities.
        at_target: the gradient of these, N x 1.
        begin: the first column.
    """
    width = softmax.shape[1] - 1
    inside = (labels >= begin) & (labels < begin + width)
    softmax[:, width] = torch.where(inside, float("-inf"), target)
    gradient = torch.zeros_like(softmax)
    gradient.scatter_(1, torch.where(inside, labels - begin, width).unsqueeze(1), at_target)
    return _aten._log_softmax_backward_data(gradient, softmax, 1, softmax.dtype)


def _gradient_columns(x: Operands, how: Loss, statistics: Tensor, at_target: Tensor, begin: int, end: int) -> Tensor:
    """The gradient of the logits of all rows from ``begin`` to ``end`` (definition 3), in the type of ``h``."""
    width = end - begin
    softmax = statistics.new_empty((x.h.shape[0], width + 1))
    softmax[:, :width], made = apply_text(how.logit_ops, x.columns(begin, end).logits(), softmax.dtype)
    softmax[:, :width].sub_(statistics[MAX].unsqueeze(1)).add_(statistics[LOG_SUM].unsqueeze(1))
    whole = gradient_of_columns(softmax, how.labels, statistics[TARGET], at_target, begin)
    del softmax
    whole = clear_unread(whole, how.cut, 0)[:, :width]
    return taken_back(how.logit_ops, whole.contiguous() if how.logit_ops else whole, made, x.h.dtype)


def gradients_by_columns(
    x: Operands,
    how: Loss,
    statistics: Tensor,
    tangent: Tensor,
    total_weight: Tensor,
    known: Tensor | None,
    columns: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of weight (V x D) and bias (1 x V); ``known`` are the first columns of that of the logits."""
    at_target = target_gradients(statistics[TARGET], how, tangents_of(how, tangent), total_weight)
    classes = x.wt.shape[1]
    weight = x.h.new_empty((classes, x.h.shape[1]))
    sums = x.h.new_empty(0 if x.bias is None else (1, classes))
    for a, b in spans(classes, columns):
        if known is not None and b <= known.shape[1]:
            part = known[:, a:b]
        else:
            part = _gradient_columns(x, how, statistics, at_target, a, b)
        torch.mm(part.t(), x.h, out=weight[a:b])
        if x.bias is not None:
            torch.sum(part, [0], True, out=sums[:, a:b])
        del part
    return weight, sums


def known_columns(length: int, share: float, columns: int) -> int:
    """How many of the first columns lie in slices that end within ``share`` of them."""
    return max((end for _, end in spans(length, columns) if end <= share * length), default=0)
