"""A tensor that a fitted part reads several times, and others read too: its gradient may differ, which is said."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide

SAID = "Eager adds its gradients one by one"


class Twice(nn.Module):
    """Reads its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x).tanh().mean() + self.other(x).tanh().mean()


class Tied(nn.Module):
    """Reads its weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return (self.embedding(x) @ self.embedding.weight.t()).square().mean()


def said(run: Callable[[], Any]) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return sum(SAID in str(each.message) for each in caught)


@pytest.mark.parametrize("first", [True, False])
def test_the_loss_reads_what_the_model_reads(first: bool) -> None:
    torch.manual_seed(0)
    before, model, x = nn.Linear(16, 32), Twice(), torch.randn(64, 16)
    eager_before, eager = copy.deepcopy((before, model))
    fitted = ebbtide.fit(model, "1GiB", progress=None)

    def step(body: nn.Module, head: nn.Module) -> None:
        hidden = body(x)
        outside = hidden.abs().mean()
        inside = head(hidden)
        ((outside + inside) if first else (inside + hidden.abs().mean())).backward()

    assert [said(lambda: step(before, fitted)) for _ in range(3)] == [1, 0, 0]
    for _ in range(3):
        step(eager_before, eager)
    ours, theirs = before.weight.grad, eager_before.weight.grad
    assert ours is not None
    assert theirs is not None
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


def test_a_weight_read_outside() -> None:
    torch.manual_seed(0)
    model = Tied()
    fitted = ebbtide.fit(model, "1GiB", progress=None)
    x = torch.randint(0, 16, (4, 8))
    assert said(lambda: (fitted(x) + fitted.embedding.weight.square().mean()).backward()) == 1


@pytest.mark.parametrize(("model", "x"), [(Tied(), torch.randint(0, 16, (4, 8))), (Twice(), torch.randn(4, 32))])
def test_nothing_is_said_where_nothing_else_reads(model: nn.Module, x: Tensor) -> None:
    fitted = ebbtide.fit(model, "1GiB", progress=None)
    leaf = x.requires_grad_() if x.is_floating_point() else x

    def train() -> None:
        for _ in range(3):
            given = leaf * 1.5 if leaf.requires_grad else leaf
            fitted(given).backward()

    assert said(train) == 0


def test_a_hook_that_changes_a_gradient_is_no_other_reader() -> None:
    fitted = ebbtide.fit(Tied(), "1GiB", progress=None)
    fitted.embedding.weight.register_hook(lambda gradient: gradient * 2)
    assert said(lambda: fitted(torch.randint(0, 16, (4, 8))).backward()) == 0


class Encoder(nn.Module):
    """A recurrent module, which reads its weights once per position."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0][:, -1]


class Siamese(nn.Module):
    """Both calls of an encoder."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(one), self.encoder(other)


def siamese_loss(model: nn.Module, one: Tensor, other: Tensor) -> Tensor:
    pair = model(one, other) if isinstance(model, Siamese) else (model(one), model(other))
    return nn.functional.cosine_embedding_loss(*pair, torch.ones(len(one)))


def test_two_calls_before_one_backward_are_told_of_as_such() -> None:
    torch.manual_seed(0)
    eager, one, other = Encoder(), torch.randn(16, 4, 8), torch.randn(16, 4, 8)
    fitted, whole = copy.deepcopy(eager), Siamese(copy.deepcopy(eager))
    ebbtide.fit(fitted, "1GiB", progress=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        siamese_loss(fitted, one, other).backward()
    (told,) = (str(each.message) for each in caught if SAID in str(each.message))
    assert "by several calls before one backward" in told
    assert "fit a module whose forward makes these calls" in told
    ebbtide.fit(whole, "1GiB", progress=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        siamese_loss(whole, one, other).backward()
    siamese_loss(eager, one, other).backward()
    for expected, found in zip(eager.parameters(), whole.encoder.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)  # type: ignore[arg-type]
