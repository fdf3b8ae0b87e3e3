"""Numbers that change at every call: those that steer or are told need few captures, the rest is eager's as well."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.planners import Progress


class Told(nn.Module):
    """Counts its calls; every fifth is another step, and what it is counted for is told in several forms."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.told: list[Any] = [None] * 4

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x).tanh()
        if self.calls % 5 == 0:
            self.told[0] = y.detach().sum()
        self.calls += 1
        self.told[1:] = [self.calls > 3, self.calls / 7, float(self.calls)]
        return y.square().mean(), self.calls * 2


class Weighed(Told):
    """Tensors are computed from the number."""

    def forward(self, x: torch.Tensor) -> Any:
        loss, told = super().forward(x)
        return loss * self.calls, told


class Looked(Told):
    """What the number is used for is no graph where it is a symbol."""

    def forward(self, x: torch.Tensor) -> Any:
        loss, told = super().forward(x)
        return loss * {1: 0.5, 2: 0.25}.get(self.calls, 3.0), told


def captures(kind: type[Told], calls: int) -> int:
    """How often a model is captured in so many calls, of which each has eager's bits and leaves what eager leaves."""
    torch.manual_seed(0)
    said: list[Progress] = []
    plain = kind()
    model = ebbtide.fit(copy.deepcopy(plain), "1MiB", progress=said.append, options=ebbtide.Options(effort=5))
    for i in range(calls):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
        for each in (plain, model):
            each.zero_grad()
        (theirs, number), (ours, other) = plain(x), model(x)
        theirs.backward()
        ours.backward()
        assert torch.equal(theirs, ours)
        assert torch.equal(plain.linear.weight.grad, model.linear.weight.grad)  # type: ignore[arg-type]
        assert (number, plain.calls, plain.told[1:]) == (other, model.calls, model.told[1:])
        assert list(map(type, plain.told)) == list(map(type, model.told))
        assert torch.equal(plain.told[0], model.told[0])
    assert ebbtide.calls_of(model).planned == calls
    return sum(each.stage.startswith("capturing") for each in said)


def test_a_number_that_steers_makes_a_step_for_each_way() -> None:
    # As it is at first, then for each side of each of the two questions that it is asked: 1, 5, and no other.
    assert captures(Told, 14) == 3


@pytest.mark.parametrize("kind", [Weighed, Looked])
def test_a_number_that_is_computed_with_is_what_it_is(kind: type[Told]) -> None:
    assert captures(kind, 3) == 3
