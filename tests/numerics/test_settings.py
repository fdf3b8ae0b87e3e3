"""Settings of the capture that keep eager's meaning: hooks that come later, and where the backward runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import CaptureError

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    """Attention with dropout between two norms; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).reshape(1, 16, 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        return self.out(x.transpose(1, 2).reshape(16, 8)).float().square().mean()


def twins(model: nn.Module, budget: str = "1MiB") -> tuple[nn.Module, nn.Module]:
    return ebbtide.fit(copy.deepcopy(model), budget, options=ebbtide.Options(effort=100)), model


def step(model: nn.Module, seed: int = 0) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(X)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def double_input(_: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0] * 2,)


def triple_output(_: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return output * 3


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it, in any compiled function
@pytest.mark.parametrize(
    "hook",
    [
        lambda m: m.norm.register_forward_pre_hook(double_input),
        lambda m: m.out.register_forward_hook(triple_output),
        lambda m: m.register_forward_hook(triple_output),
    ],
    ids=["pre", "forward", "of the model"],
)
def test_a_hook_put_on_after_the_first_call_is_heeded_and_one_taken_off_forgotten(
    hook: Callable[[nn.Module], torch.utils.hooks.RemovableHandle],
) -> None:
    pair = twins(Attention())
    assert_same(*(step(m) for m in pair))
    handles = [hook(m) for m in pair]
    hooked = [step(m) for m in pair]
    assert_same(*hooked)
    for handle in handles:
        handle.remove()
    bare = [step(m) for m in pair]
    assert_same(*bare)
    assert not all(torch.equal(a, b) for a, b in zip(bare[0], hooked[0], strict=True)), "the hook did nothing"


def test_a_backward_hook_put_on_a_submodule_later_is_refused_by_name() -> None:
    model, _ = twins(Attention())
    step(model)
    handle = model.out.register_full_backward_hook(lambda _, into, out: (into[0] * 5,))  # type: ignore[union-attr]
    with pytest.raises(CaptureError, match="Put the hook on the fitted model itself"):
        step(model)
    handle.remove()
    assert_same(step(model), step(model))


def test_the_backward_of_a_step_under_autocast_is_that_of_eager() -> None:
    found = []
    for model in twins(Attention()):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(X)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert_same(*found)


def test_a_backward_inside_of_autocast_is_refused_before_any_gradient_leaves() -> None:
    model, _ = twins(Attention())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(X)
        with pytest.raises(CaptureError, match="Leave the autocast block"):
            loss.backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.fixture
def exact_products() -> Iterator[None]:
    """As they are by default when the test ends."""
    yield
    torch.set_float32_matmul_precision("highest")


class Products(nn.Module):
    """Square matrices, one after the other: oneDNN multiplies them in 16 bits where that is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.usefixtures("exact_products")
def test_bytes_and_bits_are_those_of_the_precision_of_products() -> None:
    """The kernels that multiply in 16 bits make copies: what one precision takes says nothing of another."""
    x = torch.randn(512, 64)
    model, plain = twins(Products(), "70%")
    for precision in ("highest", "medium", "highest"):
        torch.set_float32_matmul_precision(precision)
        for run in range(3):
            expected = left_by(plain, x)
            if run < 2:
                assert_same(left_by(model, x), expected)
                continue
            with ebbtide.measure(model) as gauge:
                found = left_by(model, x)
            assert_same(found, expected)
            plan = ebbtide.plan_of(model)
            assert plan is not None
            assert gauge.above_bytes <= plan.timeline.above_bytes


def left_by(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.usefixtures("exact_products")
def test_a_backward_of_another_precision_is_refused_before_any_gradient_leaves() -> None:
    model, _ = twins(Products(), "70%")
    x = torch.randn(512, 64)
    loss = model(x)
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(CaptureError, match="Change it between steps"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    del loss
    left_by(model, x)
