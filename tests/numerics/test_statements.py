"""Statements that a compiler alone refuses, or that eager runs and nobody plans: planned, with eager's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import ebbflow

WIDTH = 8
X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
Body = Callable[..., Any]


class Model(nn.Module):
    """Two linear layers and a stack; what is made of them is the test's."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.stack = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(4)))
        self.rate = 0.0
        self.body = body

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def history(model: nn.Module, arguments: Callable[[], tuple[Any, ...]], steps: int = 3) -> list[torch.Tensor | None]:
    """Losses and gradients of a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(2)
    found: list[torch.Tensor | None] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*arguments())
        loss.backward()
        found += [loss.detach().clone(), *(p.grad if p.grad is None else p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return [*found, torch.get_rng_state()]


def assert_trains_as_eager(model: nn.Module, arguments: Callable[[], tuple[Any, ...]] = lambda: (X,)) -> nn.Module:
    expected = history(copy.deepcopy(model), arguments)
    found = history(ebbflow.fit(model, "1GiB"), arguments)
    assert ebbflow.plan_of(model) is not None, "no step was planned"
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)  # type: ignore[arg-type]
    return model


def energy(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_(True)
    value = torch.tanh(m.two(torch.tanh(m.one(x)))).sum()
    (force,) = torch.autograd.grad(value, x, create_graph=True)
    return (force - 1).square().mean()


def leaf_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = m.one(x).detach().requires_grad_(True)
    return m.two(torch.tanh(hidden)).square().mean()


def layerdrop(m: Any, x: torch.Tensor) -> torch.Tensor:
    for each in m.stack:
        drawn = torch.rand([])
        skip = m.training and (drawn < m.rate)
        if not skip:
            x = torch.tanh(each(x))
        if m.rate > drawn or drawn >= 1 or not drawn > -1e-3:
            x = x * 2
    return m.one(x).square().mean()


def sequential(reentrant: bool) -> Body:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(m.stack, 3, m.one(x), use_reentrant=reentrant).square().mean()

    return body


def checkpointed(reentrant: bool) -> Body:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(m.stack, m.one(x), use_reentrant=reentrant).square().mean()

    return body


def draws_in_vain(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.rand(3)
    x = F.dropout(m.one(x), 0.2)
    torch.randint(5, (2,)), torch.bernoulli(x.sigmoid())
    return F.dropout(x, 0.2).square().mean()


BODIES: dict[str, Body] = {
    "autograd.grad": energy,
    "a leaf inside": leaf_inside,
    "layerdrop of 0": layerdrop,
    "draws that nobody reads": draws_in_vain,
    "sequential checkpoints": sequential(False),
    "reentrant sequential checkpoints": sequential(True),
    "reentrant checkpoint": checkpointed(True),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_statement_is_planned_with_eagers_bits(name: str) -> None:
    assert_trains_as_eager(Model(BODIES[name]))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_hook_that_makes_an_embedding_take_a_gradient(frozen: bool) -> None:
    """What transformers' ``enable_input_require_grads`` does for PEFT and for checkpoints."""
    model = Model(lambda m, i: checkpoint(m.stack, torch.tanh(m.table(i)), use_reentrant=True).square().mean())
    model.table = nn.Embedding(10, WIDTH)
    model.table.weight.requires_grad_(not frozen)
    model.table.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    assert_trains_as_eager(model, lambda: (torch.tensor([1, 2, 2]),))
