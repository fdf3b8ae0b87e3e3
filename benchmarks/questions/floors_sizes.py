"""A head in slices over random sizes: where its facts are measured to hold, its bits are eager's.

Rows, widths and vocabularies are drawn with primes and odd ones among them; labels are ignored in part, or all; slices
are those that a plan may choose, and odd ones. Each size runs every form. It is *wrong* where all facts that a form
rests on were measured to hold and a bit differs, and *left* where one does not hold: that form would not be used.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ebbtide.rewrites.heads import slices as head_slices
from ebbtide.rewrites.heads.facts import HeadSizes, column_facts, row_facts, softmax_facts
from ebbtide.rewrites.heads.kernels import HEAD_OPS
from harness.record import Row, at_least, at_most

TITLE = "Heads in slices over random sizes: wrong bits where the facts hold"
CASES = tuple(f"{dtype}, {threads} threads" for dtype in ("float32", "bfloat16") for threads in (1, 2))
QUICK = ("float32, 1 threads",)
SIZES = 84
"""Per case; four cases make 336."""
ODD = (1, 2, 3, 5, 7, 11, 13, 17, 31, 61, 127, 251, 509, 1021, 2039)
MOST_WORK = 3e8
"""Multiplications of one product."""

_aten = torch.ops.aten
_ops = SimpleNamespace(**{name: op.target for name, op in HEAD_OPS.items()})


def _drawn(choose: random.Random) -> tuple[int, int, int]:
    """N, D and V."""
    while True:
        n = int(17 * (2048 / 17) ** choose.random())
        d = int(32 * (1024 / 32) ** choose.random())
        v = int(100 * (50257 / 100) ** choose.random())
        if choose.random() < 0.3:
            v = choose.choice((257, 1009, 5003, 10007, 32003, 50257))
        if choose.random() < 0.3:
            n = choose.choice((17, 31, 101, 257, 509, 1021, 2039))
        if choose.random() < 0.3:
            d = choose.choice((33, 47, 97, 101, 257, 768, 1000))
        if n * d * v <= MOST_WORK:
            return n, d, v


def _head(choose: random.Random, dtype: torch.dtype) -> dict[str, Any]:
    n, d, v = _drawn(choose)
    drawing = torch.Generator().manual_seed(choose.randrange(2**31))
    ignored = choose.choice((-100, 0, 5))
    labels = torch.randint(v, (n,), generator=drawing)
    labels[torch.rand(n, generator=drawing) < choose.choice((0.0, 0.2, 0.9))] = ignored
    return {
        "h": torch.randn(n, d, generator=drawing).to(dtype),
        "wt": (torch.randn(v, d, generator=drawing) * 0.1).to(dtype).t(),
        "bias": torch.randn(v, generator=drawing).to(dtype) if choose.random() < 0.3 else None,
        "labels": labels,
        "how": (choose.choice((1, 2)), ignored),
        "tangent": torch.tensor(choose.choice((1.0, 0.37))),
        "rows": max(16, n // choose.choice((4, 16, 64))) + choose.choice((0, 0, *ODD)),
        "columns": max(16, v // choose.choice((4, 16, 64))) + choose.choice((0, 0, *ODD)),
    }


def _eager(c: dict[str, Any]) -> list[Tensor]:
    """Loss, total weight and gradients by the kernels that autograd calls."""
    h, wt, bias, labels, (reduction, ignored) = c["h"], c["wt"], c["bias"], c["labels"], c["how"]
    logits = torch.mm(h, wt) if bias is None else torch.addmm(bias, h, wt)
    softmax = _aten._log_softmax(logits.float(), 1, False)
    loss, weight = _aten.nll_loss_forward(softmax, labels, None, reduction, ignored)
    gradient = _aten.nll_loss_backward(c["tangent"], softmax, labels, None, reduction, ignored, weight)
    gradient = _aten._log_softmax_backward_data(gradient, softmax, 1, torch.float32).to(h.dtype)
    sums = h.new_empty(0) if bias is None else gradient.sum([0], True)
    return [loss, weight, torch.mm(gradient, wt.t()), torch.mm(gradient.t(), h), sums]


def _forms(c: dict[str, Any]) -> Iterator[tuple[str, list[Tensor]]]:
    operands = (c["h"], c["wt"], c["bias"], c["labels"])
    how: tuple[Any, ...] = (*c["how"], [], "")  # no cut, nothing between product and softmax
    last = (*how, torch.float32, c["rows"])
    loss, weight, kept, _ = _ops.forward_that_keeps(*operands, *last, False)
    yield "kept", [loss, weight, *_ops.backward_over_kept(kept, *operands, c["tangent"], weight, None, *last, True)]
    loss, weight, statistics, _, none = _ops.forward_by_rows(*operands, None, *last, 0)
    hidden = _ops.backward_by_rows(*operands, c["tangent"], weight, *last)
    rest = (*operands, statistics, c["tangent"], weight, *how, c["columns"])
    yield "rows", [loss, weight, hidden, *_ops.backward_by_columns(none, None, *rest)]
    guess = torch.tensor(1.0)
    known = head_slices.known_columns(c["wt"].shape[1], 0.5, c["columns"])
    loss, weight, statistics, hidden, first = _ops.forward_by_rows(*operands, guess, *last, known)
    hidden = _ops.settle_guess(hidden, guess, *operands, c["tangent"], weight, *last)
    rest = (*operands, statistics, c["tangent"], weight, *how, c["columns"])
    yield "guessed", [loss, weight, hidden, *_ops.backward_by_columns(first, guess, *rest)]


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, where no number is no number: a mean over labels that are all ignored is none in eager either."""
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    missing = a.isnan()
    if a.shape != b.shape or not torch.equal(missing, b.isnan()):
        return False
    one, other = (each.masked_fill(missing, 0.0).contiguous().view(integers) for each in (a, b))
    return torch.equal(one, other)


def rows(case: str, quick: bool) -> Iterator[Row]:
    name, threads = case.split(", ")
    dtype = getattr(torch, name)
    torch.set_num_threads(int(threads.split()[0]))
    choose = random.Random(case)
    wrong: list[str] = []
    used = left = 0
    count = 4 if quick else SIZES
    for _ in range(count):
        c = _head(choose, dtype)
        (n, d), v = c["h"].shape, c["wt"].shape[1]
        strides = tuple(c["h"].stride()), tuple(c["wt"].stride())
        sizes = HeadSizes(n, d, v, dtype, torch.float32, *strides, c["bias"] is not None, c["how"][0], "cpu")
        softmax = [fact.holds() for fact in softmax_facts(sizes, c["rows"], [c["columns"]])]
        products = [*row_facts(sizes, c["rows"]), *column_facts(sizes, c["columns"])]
        all_hold = all(softmax) and all(fact.holds() for fact in products)
        expected = _eager(c)
        for form, found in _forms(c):
            if not (all(softmax[:2]) if form == "kept" else all_hold):
                left += 1
                continue
            used += 1
            if not all(map(_same, found, expected)):
                wrong.append(f"{form} of {n} x {d} x {v} by {c['rows']} and {c['columns']}")
    checks = (at_most("wrong", len(wrong), 0), at_least("forms used", used, count))
    columns = {"case": case, "sizes": count, "forms_used": used, "forms_left": left, "wrong": "; ".join(wrong) or 0}
    yield Row("sizes", columns, checks)
