"""A head in slices has eager's bits wherever the facts hold that it rests on; sizes odd and even, float and half."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ebbtide.rewrites.heads.facts import HeadSizes, column_facts, row_facts, softmax_facts
from ebbtide.rewrites.heads.kernels import HEAD_OPS
from ebbtide.rewrites.heads.slices import known_columns
from ebbtide.rewrites.spans import LEAST, spans

aten = torch.ops.aten
ops = SimpleNamespace(**{name: op.target for name, op in HEAD_OPS.items()})


How = tuple[int, int, list[int], str]
"""Reduction, ignored label, cut, and what is made of the logits before their softmax."""
BETWEEN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "": (lambda x: x, lambda g, x: g),
    "div 3.0, tanh, mul 3.0": (
        lambda x: torch.tanh(x / 3) * 3,
        lambda g, x: aten.tanh_backward(g * 3, torch.tanh(x / 3)) / 3,
    ),
    "mul 0.7": (lambda x: x * 0.7, lambda g, x: g * 0.7),
    "tanh, cast, mul 5.0": (
        lambda x: torch.tanh(x).float() * 5,
        lambda g, x: aten.tanh_backward((g.float() * 5).to(x.dtype), torch.tanh(x)),
    ),
}
"""As people write it, and what autograd makes of it. The first of each but the last is before the cast."""


def eager(h: Tensor, wt: Tensor, bias: Tensor | None, labels: Tensor, how: How, tangent: Tensor) -> Any:
    """Loss, total weight and gradients by the kernels that autograd calls."""
    reduction, ignored, cut, between = how
    bend, bent_back = BETWEEN[between]
    product = torch.mm(h, wt) if bias is None else torch.addmm(bias, h, wt)
    logits = bend(product)
    runs = logits.view(-1, cut[0] if cut else 1, logits.shape[1])
    read = runs[:, cut[1] : cut[2]] if cut else runs
    softmax = aten._log_softmax(read.flatten(0, 1).float(), 1, False)
    loss, weight = aten.nll_loss_forward(softmax, labels, None, reduction, ignored)
    gradient = aten.nll_loss_backward(tangent, softmax, labels, None, reduction, ignored, weight)
    gradient = aten._log_softmax_backward_data(gradient, softmax, 1, torch.float32).view_as(read).to(logits.dtype)
    if cut:
        gradient = aten.slice_backward(gradient, runs.shape, 1, cut[1], cut[2], 1)
    gradient = bent_back(gradient.reshape(logits.shape), product)
    sums = h.new_empty(0) if bias is None else gradient.sum([0], True)
    return loss, weight, torch.mm(gradient, wt.t()), torch.mm(gradient.t(), h), sums


def drawn(seed: int) -> dict[str, Any]:
    """Sizes, slices and values of one head."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    dtype = choose.choice([torch.float32, torch.float32, torch.bfloat16])
    n, d = choose.randint(17, 400), choose.choice([32, 48, 64, 100, 128, 257])
    v = choose.choice([101, 128, 500, 1000, 1777, 2048, 3001])
    ignored = choose.choice([-100, 0, 5])
    length, cut = choose.randint(5, n), []
    if choose.random() < 0.5:
        n = n // length * length
        begin = choose.randint(0, 3)
        cut = [length, begin, choose.randint(begin + 1, length)]
    read = n // length * (cut[2] - cut[1]) if cut else n
    labels = torch.randint(v, (read,))
    labels[torch.rand(read) < 0.2] = ignored
    reduction = choose.choice([0, 1, 2])
    tangent = torch.tensor(choose.choice([1.0, 0.37])) if reduction else torch.randn(read)
    return {
        "h": torch.randn(n, d).to(dtype),
        "wt": (torch.randn(v, d) * 0.1).to(dtype).t(),
        "bias": torch.randn(v).to(dtype) if choose.random() < 0.3 else None,
        "labels": labels,
        "how": (reduction, ignored, cut, ""),
        "tangent": tangent,
        "rows": choose.choice([16, 32, 50, 64, 128]),
        "columns": choose.choice([16, 33, 64, 128, 500]),
        "threads": choose.choice([1, 2]),
    }


def varied(seed: int) -> dict[str, Any]:
    """The same, of logits that are scaled and capped."""
    c = drawn(seed)
    return c | {"how": (*c["how"][:3], random.Random(-seed).choice(list(BETWEEN)[1:]))}


def sizes_of(c: dict[str, Any], **others: Any) -> HeadSizes:
    (n, d), v = c["h"].shape, c["wt"].shape[1]
    kind = (c["h"].dtype, torch.float32, tuple(c["h"].stride()), tuple(c["wt"].stride()), c["bias"] is not None)
    reduction, _, cut, between = c["how"]
    own = {"cut": tuple(cut), "logit_ops": between, **others}
    return HeadSizes(n, d, v, *kind, reduction, "cpu", **own)


def by_rows(c: dict[str, Any]) -> Any:
    operands = (c["h"], c["wt"], c["bias"], c["labels"])
    loss, weight, statistics, _, none = ops.forward_by_rows(*operands, None, *c["how"], torch.float32, c["rows"], 0)
    hidden = ops.backward_by_rows(*operands, c["tangent"], weight, *c["how"], torch.float32, c["rows"])
    rest = (*operands, statistics, c["tangent"], weight, *c["how"], c["columns"])
    gradients = ops.backward_by_columns(none, None, *rest)
    return loss, weight, hidden, *gradients


def guessed(c: dict[str, Any], share: float) -> Any:
    operands = (c["h"], c["wt"], c["bias"], c["labels"])
    guess = torch.ones_like(c["tangent"])
    known = known_columns(c["wt"].shape[1], share, c["columns"])
    last = (*c["how"], torch.float32, c["rows"])
    loss, weight, statistics, hidden, first = ops.forward_by_rows(*operands, guess, *last, known)
    hidden = ops.settle_guess(hidden, guess, *operands, c["tangent"], weight, *last)
    rest = (*operands, statistics, c["tangent"], weight, *c["how"], c["columns"])
    return loss, weight, hidden, *ops.backward_by_columns(first, guess, *rest)


def kept(c: dict[str, Any]) -> Any:
    operands = (c["h"], c["wt"], c["bias"], c["labels"])
    last = (*c["how"], torch.float32, c["rows"])
    loss, weight, buffer, _ = ops.forward_that_keeps(*operands, *last, False)
    return loss, weight, *ops.backward_over_kept(buffer, *operands, c["tangent"], weight, None, *last, True)


def smoothed_loss(operands: tuple[Any, ...], how: How) -> Tensor:
    """By torch's own function of smoothed labels."""
    h, wt, bias, labels = operands
    logits = torch.mm(h, wt) if bias is None else torch.addmm(bias, h, wt)
    runs = logits.view(-1, how[2][0] if how[2] else 1, logits.shape[1])
    read = (runs[:, how[2][1] : how[2][2]] if how[2] else runs).flatten(0, 1).float()
    kind = ("none", "mean", "sum")[how[0]]
    return F.cross_entropy(read, labels, reduction=kind, ignore_index=how[1], label_smoothing=0.1)


class Smoothed(torch.autograd.Function):
    """The two ops, with sums and numbers of definition 6 as autograd hands them out."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, wt: Tensor, bias: Tensor | None, labels: Tensor, how: Any, rows: int) -> Any:
        last = (*how, torch.float32, rows)
        loss, weight, buffer, sums = ops.forward_that_keeps(h, wt, bias, labels, *last, True)
        ctx.save_for_backward(h, wt, bias, labels, weight, buffer)
        ctx.last = last
        return loss, sums

    @staticmethod
    def backward(ctx: Any, tangent: Tensor, numbers: Tensor) -> Any:
        h, wt, bias, labels, weight, buffer = ctx.saved_tensors
        call = (buffer, h, wt, bias, labels, tangent, weight, numbers, *ctx.last, True)
        hidden, of_weight, of_bias = ops.backward_over_kept(*call)
        return hidden, of_weight.t(), None if bias is None else of_bias.view(-1), None, None, None


def smoothed(operands: tuple[Any, ...], how: How, rows: int) -> Tensor:
    """The same as torch's source puts it together (aten/src/ATen/native/LossNLL.cpp)."""
    loss, sums = Smoothed.apply(*operands, how, rows)  # type: ignore[no-untyped-call]
    ignored = operands[3] == how[1]
    even = (-sums).masked_fill(ignored, 0.0)
    if how[0]:
        even = even.sum()
    if how[0] == 1:
        even = even / (~ignored).sum()
    return loss * (1 - 0.1) + even * (0.1 / operands[1].shape[1])


@pytest.mark.parametrize("first", range(0, 12, 4))
def test_smoothed_labels_have_eagers_bits_wherever_the_facts_hold(first: int) -> None:
    used = 0
    before = torch.get_num_threads()
    try:
        for seed in range(first, first + 4):
            c = drawn(seed)
            torch.set_num_threads(c["threads"])
            operands = (c["h"], c["wt"], c["bias"], c["labels"])
            sizes = sizes_of(c, smoothed=True)
            if not all(fact.holds() for fact in softmax_facts(sizes, c["rows"], [])):
                continue
            used += 1
            trained = [each.requires_grad_() for each in operands[:3] if each is not None]
            losses = smoothed(operands, c["how"], c["rows"]), smoothed_loss(operands, c["how"])
            assert torch.equal(*losses), seed
            found, expected = (torch.autograd.grad(loss, trained, c["tangent"]) for loss in losses)
            assert all(map(torch.equal, found, expected)), seed
    finally:
        torch.set_num_threads(before)
    assert used >= 2


@pytest.mark.parametrize("draw", [drawn, varied])
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_slices_have_the_bits_of_the_whole_wherever_the_facts_hold(
    first: int, draw: Callable[[int], dict[str, Any]]
) -> None:
    used = 0
    before = torch.get_num_threads()
    try:
        for seed in range(first, first + 4):
            c = draw(seed)
            torch.set_num_threads(c["threads"])
            expected = eager(c["h"], c["wt"], c["bias"], c["labels"], c["how"], c["tangent"])
            sizes = sizes_of(c)
            softmax = [fact.holds() for fact in softmax_facts(sizes, c["rows"], [c["columns"]])]
            if all([*softmax[:2], *softmax[3:]]):
                assert all(map(torch.equal, kept(c), expected)), seed
            products = [*row_facts(sizes, c["rows"]), *column_facts(sizes, c["columns"])]
            if all(softmax) and all(fact.holds() for fact in products):
                used += 1
                for found in (by_rows(c), guessed(c, 0.0), guessed(c, 0.5), guessed(c, 1.0)):
                    assert all(map(torch.equal, found, expected)), seed
    finally:
        torch.set_num_threads(before)
    assert used >= 2


@pytest.mark.parametrize("labels", ["all ignored", "one left", "ties", "infinite"])
@pytest.mark.parametrize("seed", [2, 11])  # all rows are read; those with infinite numbers are not
def test_edges(labels: str, seed: int) -> None:
    c = drawn(seed) | {"bias": None, "tangent": torch.tensor(1.0)}
    ignored = c["how"][1]
    c["how"] = (1, *c["how"][1:])
    if labels == "all ignored":
        c["labels"] = torch.full_like(c["labels"], ignored)
    elif labels == "one left":
        c["labels"] = torch.full_like(c["labels"], ignored)
        c["labels"][3] = 7
    elif labels == "ties":
        c["h"] = torch.zeros_like(c["h"])
    else:
        c["h"][2, 0] = float("inf")
    expected = eager(c["h"], c["wt"], c["bias"], c["labels"], c["how"], c["tangent"])
    for found in (kept(c), by_rows(c), guessed(c, 0.5)):
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(torch.nan_to_num(mine), torch.nan_to_num(theirs))
            assert torch.equal(mine.isnan(), theirs.isnan())


def test_a_retained_graph_is_not_written_over() -> None:
    class Head(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor, wt: Tensor, labels: Tensor) -> Tensor:
            last = (1, -100, [], "", torch.float32, 32, False)
            loss, weight, buffer, _ = ops.forward_that_keeps(h, wt, None, labels, *last)
            ctx.save_for_backward(h, wt, labels, weight, buffer)
            return loss

        @staticmethod
        def backward(ctx: Any, tangent: Tensor) -> Any:
            h, wt, labels, weight, buffer = ctx.saved_tensors
            last = (1, -100, [], "", torch.float32, 32, True)
            hidden, _, _ = ops.backward_over_kept(buffer, h, wt, None, labels, tangent, weight, None, *last)
            return hidden, None, None

    h = torch.randn(64, 16, requires_grad=True)
    loss = Head.apply(h, torch.randn(16, 50), torch.randint(50, (64,)))
    loss.backward(retain_graph=True)
    first, h.grad = h.grad, None
    loss.backward()
    assert first is not None
    assert h.grad is not None
    assert torch.equal(first, h.grad)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 100, 257])
@pytest.mark.parametrize("size", [1, 16, 17, 30, 64, 1000])
def test_spans_cover_and_none_is_short(length: int, size: int) -> None:
    found = spans(length, size)
    assert [a for a, _ in found] == [0, *(b for _, b in found[:-1])]
    assert found[-1][1] == length
    widths = [b - a for a, b in found]
    assert min(widths) >= min(LEAST, length)
    assert max(widths) - min(widths) <= 1
