"""The facts that ``heads.kernels`` rests on, for one head and sizes of slices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import starmap

import torch
from torch import Tensor

from ebbtide.rewrites.facts import Fact, either, normal, own, place_of_whole, same_bits
from ebbtide.rewrites.heads.cuts import read, rows_read
from ebbtide.rewrites.heads.logit_ops import apply_text, caps, taken_back
from ebbtide.rewrites.heads.slices import (
    Loss,
    Operands,
    gradient_of_columns,
    gradient_over,
    gradient_rows,
    loss_and_weight,
    loss_of,
    target_gradients,
    targets_of,
)
from ebbtide.rewrites.spans import LEAST, spans

__all__ = [
    "HeadSizes",
    "all_equal",
    "column_facts",
    "logits_by_slices",
    "logits_in_slices",
    "row_facts",
    "softmax_facts",
]

_aten = torch.ops.aten
_IGNORED = -100


@dataclass(frozen=True)
class HeadSizes:
    """What the kernels of a head depend on.

    Attributes:
        rows: N, tokens.
        width: D, of the hidden states.
        vocabulary: V.
        dtype: of the products.
        softmax: of the softmax.
        h_stride: of the hidden states, in elements.
        wt_stride: of the transposed weight (D x V).
        bias: whether there is one.
        reduction: 0 for none, 1 for the mean, 2 for the sum.
        device: type.
        cut: which rows the loss reads (``heads.cuts``).
        smoothed: whether labels are.
        logit_ops: what is made of the logits before their softmax (``heads.logit_ops``); empty for a cast alone.
    """

    rows: int
    width: int
    vocabulary: int
    dtype: torch.dtype
    softmax: torch.dtype
    h_stride: tuple[int, int]
    wt_stride: tuple[int, int]
    bias: bool
    reduction: int
    device: str
    cut: tuple[int, ...] = ()
    smoothed: bool = False
    logit_ops: str = ""

    @property
    def logits_bytes(self) -> int:
        """Bytes of N x V in the type of the products."""
        return self.rows * self.vocabulary * self.dtype.itemsize

    @property
    def softmax_bytes(self) -> int:
        """Bytes of N x V in the type of the softmax."""
        return self.rows * self.vocabulary * self.softmax.itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes of logits, log-softmax and its gradient, all at once."""
        return self.logits_bytes + 2 * self.softmax_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of V x D."""
        return self.vocabulary * self.width * self.dtype.itemsize

    @property
    def hidden_bytes(self) -> int:
        """Bytes of N x D."""
        return self.rows * self.width * self.dtype.itemsize

    @property
    def operand_bytes(self) -> int:
        """Bytes of hidden states and weight."""
        return self.hidden_bytes + self.weight_bytes

    def __str__(self) -> str:
        kind = f"{str(self.dtype).removeprefix('torch.')}>{str(self.softmax).removeprefix('torch.')}"
        shapes = f"h[{self.rows},{self.width}]:{list(self.h_stride)} wt[{self.width},{self.vocabulary}]"
        cut = f" cut={list(self.cut)}" if self.cut else ""
        smoothed = " smoothed" if self.smoothed else ""
        smoothed += f" logit_ops=[{self.logit_ops}]" if self.logit_ops else ""
        return f"{shapes}:{list(self.wt_stride)} {kind} bias={int(self.bias)} reduction={self.reduction}{cut}{smoothed}"


# -- made-up operands ---------------------------------------------------------------------------------------------


def _strided(sizes: HeadSizes, shape: tuple[int, int], stride: tuple[int, int], seed: int) -> Tensor:
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return normal((extent,), sizes.dtype, sizes.device, seed).as_strided(shape, stride)


def _operands(sizes: HeadSizes) -> Operands:
    h = _strided(sizes, (sizes.rows, sizes.width), sizes.h_stride, 1)
    wt = _strided(sizes, (sizes.width, sizes.vocabulary), sizes.wt_stride, 2)
    return Operands(h, wt, normal((sizes.vocabulary,), sizes.dtype, sizes.device, 3) if sizes.bias else None)


def _normal_logits(sizes: HeadSizes, dtype: torch.dtype, seed: int) -> Tensor:
    return normal((sizes.rows, sizes.vocabulary), dtype, sizes.device, seed)


# -- products -----------------------------------------------------------------------------------------------------

Pairs = Iterator[tuple[Tensor, Tensor]]
"""Slices as they are in the whole, and as they are made by themselves."""


def logits_in_slices(x: Operands, axis: str, size: int) -> Pairs:
    """``"rows"`` or ``"columns"`` of the logits, made whole, and products of ``size`` of these."""
    whole = x.logits(place_of_whole((x.h.shape[0], x.wt.shape[1]), x.h.dtype))
    for a, b in spans(x.h.shape[0] if axis == "rows" else x.wt.shape[1], size):
        if axis == "rows":
            yield whole[a:b], x.rows(a, b).logits()
        else:
            yield whole[:, a:b], x.columns(a, b).logits()


def all_equal(pairs: Pairs) -> bool:
    """Whether the two of each pair have the same bits."""
    return all(starmap(same_bits, pairs))  # which holds no pair while the next one is made


def logits_by_slices(sizes: HeadSizes, axis: str, size: int) -> tuple[int, int]:
    """Bytes of the largest slice of the logits, and of all of them with that."""
    along, more = (sizes.rows, 0) if axis == "rows" else (sizes.vocabulary, 1)
    part = -(-sizes.logits_bytes * (size + more) // max(along, 1))
    return part, sizes.logits_bytes + part


def row_facts(sizes: HeadSizes, rows: int) -> Iterator[Fact]:
    """Rows of the logits and of the gradient of the hidden states are products of rows."""

    def of_hidden() -> Pairs:
        gradient, w = _normal_logits(sizes, sizes.dtype, 4), _operands(sizes).wt.t()
        whole = torch.mm(gradient, w, out=place_of_whole((sizes.rows, sizes.width), sizes.dtype))
        for a, b in spans(sizes.rows, rows):
            for part in either(gradient[a:b]):
                yield whole[a:b], torch.mm(part, w)

    part, needs = logits_by_slices(sizes, "rows", rows)
    yield _product_fact(
        f"rows of logits {sizes} by {rows}",
        f"{rows} rows of the logits at a time",
        sizes,
        needs,
        part,
        lambda: logits_in_slices(_operands(sizes), "rows", rows),
    )
    yield _product_fact(
        f"rows of hidden {sizes} by {rows}",
        f"{rows} rows of the hidden states' gradient at a time",
        sizes,
        sizes.logits_bytes + sizes.operand_bytes,
        part + sizes.hidden_bytes,
        of_hidden,
    )


def column_facts(sizes: HeadSizes, columns: int) -> Iterator[Fact]:
    """Columns of the logits and rows of the gradient of the weight are products of columns; so are bias sums."""

    def of_weight() -> Pairs:
        gradient, h = _normal_logits(sizes, sizes.dtype, 4), _operands(sizes).h
        whole = torch.mm(gradient.t(), h, out=place_of_whole((sizes.vocabulary, sizes.width), sizes.dtype))
        sums = torch.sum(gradient, [0]) if sizes.bias else None
        for a, b in spans(sizes.vocabulary, columns):
            part = _as_columns(sizes, gradient[:, a:b])
            yield whole[a:b], torch.mm(part.t(), h)
            if sums is not None:
                yield sums[a:b], torch.sum(part, [0])

    part, needs = logits_by_slices(sizes, "columns", columns)
    yield _product_fact(
        f"columns of logits {sizes} by {columns}",
        f"{columns} columns of the logits",
        sizes,
        needs,
        part,
        lambda: logits_in_slices(_operands(sizes), "columns", columns),
    )
    yield _product_fact(
        f"columns of weight {sizes} by {columns}",
        f"{columns} rows of the weight's gradient",
        sizes,
        sizes.logits_bytes + sizes.operand_bytes + sizes.weight_bytes + part,
        part + -(-sizes.weight_bytes * columns // max(sizes.vocabulary, 1)),
        of_weight,
    )


def _product_fact(
    signature: str, says: str, sizes: HeadSizes, needs: int, made: int, pairs: Callable[[], Pairs]
) -> Fact:
    """About products of the operands, which take ``needs`` bytes besides them, ``made`` of them in no file.

    Kernels that sum narrow numbers in float32 copy the operands.
    """
    widened = 2 * (sizes.operand_bytes + sizes.weight_bytes) if sizes.dtype.itemsize < 4 else 0
    needs += sizes.operand_bytes + widened
    return Fact(signature, says, needs, lambda: all_equal(pairs()), made_bytes=made + widened)


def _as_columns(sizes: HeadSizes, values: Tensor) -> Tensor:
    """``values`` laid out as the gradient of some columns is: with one column more, or copied to another type."""
    if sizes.dtype != sizes.softmax or sizes.logit_ops:
        return own(values)
    held = values.new_empty((values.shape[0], values.shape[1] + 1))
    held[:, :-1] = values
    return held[:, :-1]


# -- the softmax --------------------------------------------------------------------------------------------------

_FEW_SLICES = (2, 4)
"""Slices of rows on which the softmax is tried where there is no room for all: a row of it depends on no other row."""
_FEW_CLASSES = 256
"""On which the loss is tried, which reads one number of each row."""


def softmax_facts(sizes: HeadSizes, rows: int, columns: Sequence[int]) -> Iterator[Fact]:
    """Log-softmax and its gradient are of one row, by columns too; the loss is that of the targets' column."""
    read_rows, classes = rows_read(sizes.rows, sizes.cut), min(sizes.vocabulary, _FEW_CLASSES)
    few_classes = replace(sizes, rows=read_rows, vocabulary=classes, cut=())
    yield Fact(
        f"loss {sizes}",
        "the loss of the targets' log-probabilities",
        2 * sizes.rows * _FEW_CLASSES * sizes.softmax.itemsize,
        lambda: all_equal(_losses(few_classes)),
    )
    whole = replace(sizes, cut=())
    fewer = [replace(whole, rows=min(sizes.rows, count * max(rows, LEAST))) for count in _FEW_SLICES]
    yield _smallest_last(_rows_fact(each, rows) for each in (*fewer, sizes))
    for size in columns:
        yield _smallest_last(_columns_fact(each, size) for each in (*fewer, whole))
    if sizes.logit_ops:
        yield _smallest_last(_logit_ops_fact(each, rows, columns) for each in (*fewer, whole))


def _smallest_last(facts: Iterable[Fact]) -> Fact:
    """The last of ``facts``, each with the one before it for where there is no room."""
    return functools.reduce(lambda smaller, each: replace(each, smaller=smaller), facts)


def _rows_fact(sizes: HeadSizes, rows: int) -> Fact:
    part = -(-sizes.softmax_bytes * rows // max(sizes.rows, 1))
    return Fact(
        f"rows of softmax {sizes} by {rows}",
        f"{rows} rows of the softmax at a time",
        (3 if sizes.cut else 2) * sizes.softmax_bytes + 2 * part,
        lambda: all_equal(_softmax_by_rows(sizes, rows)),
        made_bytes=(2 if sizes.cut else 1) * sizes.softmax_bytes + 2 * part,
    )


def _columns_fact(sizes: HeadSizes, columns: int) -> Fact:
    part = -(-sizes.softmax_bytes * (columns + 1) // max(sizes.vocabulary, 1))
    return Fact(
        f"columns of softmax {sizes} by {columns}",
        f"{columns} columns of the softmax at a time",
        2 * sizes.softmax_bytes + 3 * part,
        lambda: all_equal(_softmax_by_columns(sizes, columns)),
        made_bytes=sizes.softmax_bytes + 3 * part,
    )


def _logit_ops_fact(sizes: HeadSizes, rows: int, columns: Sequence[int]) -> Fact:
    by = f"{rows} rows" + "".join(f", {size} columns" for size in columns)
    return Fact(
        f"logit ops {sizes} by {by}",
        f"{by} of what is made of the logits before their softmax ({sizes.logit_ops})",
        (5 + caps(sizes.logit_ops)) * sizes.softmax_bytes,
        lambda: all_equal(_logit_ops(sizes, rows, columns)),
    )


def _logit_ops(sizes: HeadSizes, rows: int, columns: Sequence[int]) -> Pairs:
    logits, gradient = _normal_logits(sizes, sizes.dtype, 7).mul_(8), _normal_logits(sizes, sizes.softmax, 8)
    whole, kept = apply_text(sizes.logit_ops, logits, sizes.softmax)
    back = taken_back(sizes.logit_ops, gradient, kept, sizes.dtype)
    del kept
    slices = [(slice(a, b), slice(None)) for a, b in spans(sizes.rows, rows)]
    slices += [(slice(None), slice(a, b)) for size in columns for a, b in spans(sizes.vocabulary, size)]
    for each in slices:
        part, made = apply_text(sizes.logit_ops, own(logits[each]), sizes.softmax)
        yield whole[each], part
        yield back[each], taken_back(sizes.logit_ops, own(gradient[each]), made, sizes.dtype)


def _sample(sizes: HeadSizes) -> tuple[Tensor, Loss, Tensor]:
    """Logits, a loss of labels of which some are ignored, and its gradient: one, or one for each row."""
    x = _normal_logits(sizes, sizes.softmax, 5)
    labels = torch.arange(sizes.rows, device=sizes.device) * 7919 % sizes.vocabulary
    labels[::11] = _IGNORED
    how = loss_of(sizes.rows, labels, sizes.reduction, _IGNORED, (), "")
    shape = () if sizes.reduction else (sizes.rows,)
    return x, how, torch.full(shape, 0.37, dtype=sizes.softmax, device=sizes.device)


def _log_softmax(x: Tensor) -> Tensor:
    place = place_of_whole(tuple(x.shape), x.dtype)
    return _aten._log_softmax(x, 1, False) if place is None else _aten._log_softmax.out(x, 1, False, out=place)


def _whole_loss(softmax: Tensor, how: Loss) -> tuple[Tensor, Tensor]:
    """Loss and total weight as eager has them."""
    return _aten.nll_loss_forward(softmax, how.labels, None, how.reduction, how.ignore_index)


def _losses(sizes: HeadSizes) -> Pairs:
    x, how, _ = _sample(sizes)
    whole = _aten._log_softmax(x, 1, False)
    yield from zip(_whole_loss(whole, how), loss_and_weight(targets_of(whole, how.labels), how), strict=True)


def _numbers(sizes: HeadSizes, rows: int) -> Tensor | None:
    """What smoothed labels add to the gradient of each row."""
    return normal((rows,), sizes.softmax, sizes.device, 6) if sizes.smoothed else None


def _softmax_by_rows(sizes: HeadSizes, rows: int) -> Pairs:
    x, how, tangent = _sample(replace(sizes, rows=rows_read(sizes.rows, sizes.cut), cut=()))
    if sizes.cut:
        x = _normal_logits(sizes, sizes.softmax, 5)
    whole = _log_softmax(read(x, sizes.cut))
    places = read(torch.arange(sizes.rows, device=sizes.device), sizes.cut).contiguous()
    sums = torch.sum(whole, [1]) if sizes.smoothed else None
    slices: list[tuple[int, int]] = []
    for a, b in spans(sizes.rows, rows):
        first, end = torch.searchsorted(places, torch.tensor([a, b], device=places.device)).tolist()
        part = _aten._log_softmax(x[a:b], 1, False)
        own_rows = places[first:end] - a if sizes.cut else slice(None)
        yield whole[first:end], part[own_rows]
        if sums is not None:
            yield sums[first:end], torch.sum(part, [1])[own_rows]
        slices.append((first, end))
        del part
    del x
    weight, numbers = _whole_loss(whole, how)[1], _numbers(sizes, whole.shape[0])
    gradient = gradient_over(whole, how, tangent, weight, numbers)
    for a, b in slices:
        yield gradient[a:b], gradient_rows(whole[a:b], how, tangent, weight, a, b, numbers)


def _softmax_by_columns(sizes: HeadSizes, columns: int) -> Pairs:
    x, how, tangent = _sample(sizes)
    largest, where = x.max(1)
    whole = _log_softmax(x)
    log_sum = whole.gather(1, where.unsqueeze(1))
    slices = spans(sizes.vocabulary, columns)
    for a, b in slices:
        yield whole[:, a:b], (x[:, a:b] - largest.unsqueeze(1)).add_(log_sum)
    del x
    weight = _whole_loss(whole, how)[1]
    gradient = gradient_over(whole, how, tangent, weight, _numbers(sizes, whole.shape[0]))
    target = targets_of(whole, how.labels)
    at_target = target_gradients(target, how, tangent, weight)
    for a, b in slices:
        softmax = whole.new_empty((sizes.rows, b - a + 1))
        softmax[:, :-1] = whole[:, a:b]
        yield gradient[:, a:b], gradient_of_columns(softmax, how.labels, target, at_target, a)[:, :-1]
