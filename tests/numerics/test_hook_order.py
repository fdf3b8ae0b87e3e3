"""Hooks on parameters fire in eager's order, so hooks that draw random numbers or share state give eager's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebbtide

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


class Many(nn.Module):
    """Tied weights, a bare parameter that is read first and last, two that get one gradient, an embedding, norms."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.p = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.scale = nn.Parameter(torch.ones(8))
        self.table = nn.Embedding(8, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.late, self.early = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(16, 8))
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale + self.table(torch.arange(16) % 8) + self.early + self.late
        x = self.norms[0](x + (self.p + self.q))
        x = x + self.mix(x[None], x[None], x[None], need_weights=False)[0][0]
        return (F.linear(self.norms[1](x), self.table.weight) * self.scale).square().mean()


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.PReLU(), nn.Linear(8, 1))


Put = Callable[[nn.Parameter, Callable[[], None]], Any]
KINDS: dict[str, Put] = {
    "gradient": lambda p, note: p.register_hook(lambda g: (note(), g + torch.randn_like(g))[1]),
    "accumulated": lambda p, note: p.register_post_accumulate_grad_hook(
        lambda p: (note(), p.grad.add_(torch.randn_like(p.grad)), None)[2]  # type: ignore[union-attr]
    ),
    "node": lambda p, note: torch.autograd.graph.get_gradient_edge(p).node.register_prehook(lambda _: note()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [Many, chain])
def test_hooks_on_parameters_fire_in_eagers_order(make: Callable[[], nn.Module], kind: str) -> None:
    torch.manual_seed(2)
    plain = make()
    model = copy.deepcopy(plain)
    fired: dict[str, list[str]] = {"eager": [], "fitted": []}
    nodes: list[Any] = []  # a node of a leaf lives as long as somebody has it
    for where, each in (("eager", plain), ("fitted", model)):
        for name, parameter in each.named_parameters():
            nodes.append(torch.autograd.graph.get_gradient_edge(parameter).node)
            KINDS[kind](parameter, lambda where=where, name=name: fired[where].append(name))
    ebbtide.fit(model, "100%", options=ebbtide.Options(effort=100))
    for each in (plain, model):
        torch.manual_seed(3)
        for _ in range(2):
            each(X).mean().backward()
    assert len(set(fired["eager"])) > 6
    assert fired["fitted"] == fired["eager"]
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert p.grad is q.grad is None or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:another forward")
def test_two_forwards_before_one_backward_keep_the_order() -> None:
    torch.manual_seed(2)
    plain, fired = chain(), dict[int, list[str]]()
    model = copy.deepcopy(plain)
    for number, each in enumerate((plain, model)):
        fired[number] = []
        for name, parameter in each.named_parameters():
            parameter.register_hook(lambda g, number=number, name=name: fired[number].append(name))
    ebbtide.fit(model, "1GiB", options=ebbtide.Options(effort=100))
    for each in (plain, model):
        (each(X) + each(X * 2)).mean().backward()
    assert fired[0] == fired[1]
