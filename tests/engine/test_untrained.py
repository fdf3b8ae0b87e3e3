"""Calls of a fitted model that have nothing to train run as they are, with gradients on or off."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.engine import compiled
from ebbtide.errors import CaptureError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


class Tower(nn.Module):
    def __init__(self, body: Callable[..., Any] = lambda m, x: m.drop(m.norm(torch.tanh(m.linear(x))))) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []
    init = compiled.Capture.__init__
    monkeypatch.setattr(compiled.Capture, "__init__", lambda *a, **k: (made.append(1), init(*a, **k))[1])
    return made


def test_a_frozen_tower_under_a_head_that_trains(captures: list[int]) -> None:
    tower = Tower().requires_grad_(False)
    twin, head = copy.deepcopy(tower), nn.Linear(4, 1)
    ebbtide.fit(tower, "1GiB")
    for _ in range(3):
        torch.manual_seed(3)
        mine = tower(X)
        torch.manual_seed(3)
        theirs = twin(X)
        assert torch.equal(mine, theirs)
        assert not mine.requires_grad
        head(mine).sum().backward()
    assert torch.equal(tower.norm.running_mean, twin.norm.running_mean)  # type: ignore[arg-type]
    assert len(captures) == 1
    tower.linear.requires_grad_(True)
    tower(X).sum().backward()
    assert tower.linear.weight.grad is not None
    assert ebbtide.plan_of(tower) is not None


def test_what_is_no_graph_needs_none_to_run_frozen(captures: list[int]) -> None:
    model = ebbtide.fit(
        Tower(lambda m, x: m.linear(x) if m.linear(x).isfinite().all() else x).requires_grad_(False), "1GiB"
    )
    for _ in range(3):
        assert torch.equal(model(X.abs()), model.linear(X.abs()))
    assert len(captures) == 1
    model.requires_grad_(True)
    with pytest.raises(CaptureError):
        model(X)


def test_a_hidden_parameter_is_trained_or_refused() -> None:
    hidden = torch.ones(4, requires_grad=True)
    model = ebbtide.fit(Tower(lambda m, x: (m.linear(x) * hidden).sum()).requires_grad_(False), "1GiB")
    model(X).backward()
    assert hidden.grad is not None
    assert ebbtide.plan_of(model) is not None, "a step that trains is planned"
    broken = Tower(lambda m, x: (m.linear(x) * hidden).sum() if hidden.sum() > 0 else hidden.sum()).requires_grad_(
        False
    )
    with pytest.raises(CaptureError):
        ebbtide.fit(broken, "1GiB")(X)
