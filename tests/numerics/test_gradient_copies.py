"""Gradients that autograd would copy after the backward are copied inside the step: same bits, no byte unplanned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide

N = 256  # a matrix of floats takes 256 KiB: far above the scalars of autograd
X = torch.randn(32, N, generator=torch.Generator().manual_seed(1))


class Shaped(nn.Module):
    """``count`` matrices and a loss of them."""

    def __init__(self, count: int, loss: Callable[..., torch.Tensor], layout: str = "rows") -> None:
        super().__init__()
        self.loss = loss
        self.count = count
        for index in range(count):
            value = torch.randn(N, N) / N
            value = value.t() if layout == "columns" else value
            value = torch.randn(N, 2 * N)[:, ::2] / N if layout == "holes" else value
            self.register_parameter(f"w{index}", nn.Parameter(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(x, *(getattr(self, f"w{index}") for index in range(self.count)))


CASES: dict[str, tuple[int, Callable[..., torch.Tensor], str]] = {
    "einsum, transposed": (1, lambda x, w: torch.einsum("bi,oi->bo", x, w).square().sum(), "rows"),
    "matrices joined by columns": (3, lambda x, q, k, v: (x @ torch.cat([q, k, v], 1)).square().sum(), "rows"),
    "matrices joined by rows": (
        2,
        lambda x, q, k: (x.repeat(1, 2) @ torch.cat([q, k], 0)).square().sum(),
        "rows",
    ),
    "a sum": (1, lambda x, w: w.sum(), "rows"),
    "a sum over rows": (1, lambda x, w: (w.sum(0) * x).sum(), "rows"),
    "eight added": (8, lambda x, *w: (x @ sum(w)).square().sum(), "rows"),
    "one twice and another": (2, lambda x, a, b: ((a + b) * (a + b).detach()).sum(), "rows"),
    "columns": (2, lambda x, a, b: (x @ a @ b).square().sum(), "columns"),
    "columns, a sum": (1, lambda x, w: w.sum(), "columns"),
    "holes": (2, lambda x, a, b: (x @ a @ b).square().sum(), "holes"),
    "plain": (2, lambda x, a, b: (x @ a @ b).square().sum(), "rows"),
    "a view": (1, lambda x, w: (x @ w.view(N, N).t()).square().sum(), "rows"),
    "stacked": (2, lambda x, a, b: torch.stack([a, b]).mul(2.0).sum(), "rows"),
    "split": (1, lambda x, w: sum((i + 1) * part.square().sum() for i, part in enumerate(w.split(N // 4, 1))), "rows"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_up_to_the_return_of_backward_is_the_predicted_one(name: str) -> None:
    torch.manual_seed(2)
    plain = Shaped(*CASES[name])
    model = ebbtide.fit(copy.deepcopy(plain), "1GiB", options=ebbtide.Options(effort=100))
    for each in (model, plain):
        for _ in range(3):  # with gradients that exist as well
            each(X).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
        assert p.grad.stride() == q.grad.stride()  # type: ignore[union-attr]
    pointers = {p.grad.untyped_storage().data_ptr() for p in plain.parameters()}  # type: ignore[union-attr]
    assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) >= len(pointers)  # type: ignore[union-attr]
    for each in (model, plain):
        each.zero_grad()
    with ebbtide.measure(model, X) as gauge:
        model(X).backward()
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert abs(gauge.above_bytes - plan.timeline.above_bytes) <= max(64, plan.timeline.above_bytes // 1000)
    with ebbtide.measure(plain, X) as eager:
        plain(X).backward()
    assert gauge.above_bytes <= 1.3 * eager.above_bytes + 64


class _Handed(torch.autograd.Function):
    """Its gradients are tensors that somebody has already: an input and its own result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = x * 2
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        x, result = ctx.saved_tensors
        return None, x, result


def test_gradients_that_are_inputs_or_results_are_copied() -> None:
    class Handed(Shaped):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _Handed.apply(x, self.w0, self.w1)

    plain = Handed(2, lambda: X)
    model = ebbtide.fit(copy.deepcopy(plain), "1GiB", options=ebbtide.Options(effort=100))
    x = torch.randn(N, N)
    before = x.clone()
    for each in (model, plain):
        for _ in range(2):
            each(x).backward(torch.ones(N, N))
    assert torch.equal(x, before), "the second gradient was added to the input"
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    for _ in range(2):  # planned anew for gradients that are new
        model.zero_grad()
        with ebbtide.measure(model, x) as gauge:
            model(x).backward(torch.ones(N, N))
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert gauge.above_bytes <= plan.timeline.above_bytes + 64


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_frozen_parameters_and_inputs_need_none(layout: str) -> None:
    plain = Shaped(2, lambda x, a, b: (x @ a.t() @ b).square().sum(), layout)
    plain.w0.requires_grad_(False)  # type: ignore[union-attr]
    model = ebbtide.fit(copy.deepcopy(plain), "1GiB", options=ebbtide.Options(effort=100))
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    for each, x in zip((model, plain), inputs, strict=True):
        each(x).backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
    assert torch.equal(model.w1.grad, plain.w1.grad)  # type: ignore[union-attr, arg-type]


def test_a_tangent_of_the_user_is_not_taken_for_a_gradient() -> None:
    class Identity(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w + x

    model = ebbtide.fit(Identity(), "1MiB", options=ebbtide.Options(effort=100))
    tangent = torch.ones(8, 8)
    for _ in range(2):
        model(torch.zeros(8, 8)).backward(tangent)
    assert torch.equal(tangent, torch.ones(8, 8))
    assert torch.equal(model.w.grad, torch.full((8, 8), 2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["einsum, transposed", "a sum", "eight added", "matrices joined by columns"])
def test_nothing_is_copied_where_gradients_are_accumulated(name: str) -> None:
    """What eager fits when it adds to gradients, a plan fits too: a copy of each would be a third model."""
    torch.manual_seed(2)
    plain = Shaped(*CASES[name])
    model = copy.deepcopy(plain)
    for _ in range(2):
        with ebbtide.measure(plain, X) as eager:
            plain(X).backward()
    resident = ebbtide.plan(
        copy.deepcopy(plain), (X,), budget="1GiB", options=ebbtide.Options(effort=10)
    ).resident_bytes
    weights = sum(4 * each.numel() for each in plain.parameters())
    ebbtide.fit(model, resident + weights + eager.above_bytes + 32768, options=ebbtide.Options(effort=10))
    for _ in range(2):
        model(X).backward()
    with ebbtide.measure(model, X) as gauge:
        model(X).backward()
    plain(X).backward()
    assert gauge.above_bytes <= eager.above_bytes + 32768
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    before = ebbtide.calls_of(model)
    model.zero_grad()
    model(X).backward()  # back to gradients that are new
    assert ebbtide.calls_of(model).planned == before.planned + 1
