"""Parameters that no used output depends on have no gradient, as in eager: not zeros, which weight decay would move."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide


class Heads(nn.Module):
    """A trunk with statistics that the step changes, two heads, and what comes before the trunk's end."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU())
        self.late = nn.Linear(16, 16)
        self.first, self.second = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        early = self.trunk(x)
        late = self.late(early)
        return {"first": self.first(late), "rest": (self.second(late), early), "ids": torch.arange(3)}


USES: dict[str, Callable[[dict[str, Any]], torch.Tensor]] = {
    "one head": lambda out: out["first"].square().mean(),
    "the other head": lambda out: out["rest"][0].square().mean(),
    "the trunk": lambda out: out["rest"][1].square().mean(),
    "both heads": lambda out: out["first"].mean() + out["rest"][0].square().mean(),
    "all": lambda out: out["first"].mean() + out["rest"][0].mean() + out["rest"][1].square().mean(),
}


@pytest.mark.parametrize("budget", ["100%", "97%"])
def test_an_optimizer_sees_what_it_sees_in_eager(budget: str) -> None:
    torch.manual_seed(0)
    plain = Heads()
    model = ebbtide.fit(copy.deepcopy(plain), budget, options=ebbtide.Options(gradients="all", effort=10))
    pair = [(each, torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.1)) for each in (plain, model)]
    for turn, use in enumerate([*USES.values()] * 2):
        for each, optimizer in pair:
            torch.manual_seed(turn)
            use(each(torch.randn(1024, 8))).backward()
            if turn % 3:
                optimizer.step()
                optimizer.zero_grad()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (name, turn)
            assert torch.equal(p, q), (name, turn)
            assert p.grad is None or torch.equal(p.grad, q.grad), (name, turn)  # type: ignore[arg-type]


def test_gradients_that_are_asked_for() -> None:
    plain = Heads()
    model = ebbtide.fit(copy.deepcopy(plain), "100%", options=ebbtide.Options(gradients="all", effort=10))
    x = torch.randn(1024, 8)
    for _ in range(3):
        found = [
            torch.autograd.grad(each(x)["first"].mean(), list(each.parameters()), allow_unused=True)
            for each in (model, plain)
        ]
        assert [each is None for each in found[0]] == [each is None for each in found[1]]
