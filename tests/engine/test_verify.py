"""``verify`` compares whole steps, leaves the model as it was, and sees every difference."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide import verify as verify_function
from ebbtide._api.verify import Verification, _same_bits
from ebbtide.errors import EbbtideError, PlanMismatch
from ebbtide.zoo import MLPChain, mlp_chain


class Tracked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chain = MLPChain(layers=2, width=8, dropout=0.1)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1.0)
        return self.chain(x)


X = torch.linspace(-1.0, 1.0, 256).reshape(32, 8)


def test_the_model_is_left_as_it_was() -> None:
    model = Tracked()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [p.grad for p in model.parameters()]
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    plan = ebbtide.plan(model, (X,), budget="1MiB")
    result = verify_function(model, (X,), {}, plan)
    assert result.equal
    assert result.eager_differences == ()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


def test_a_plan_of_another_program_is_refused() -> None:
    model = Tracked()
    plan = ebbtide.plan(model, (X,), budget="1MiB")
    with pytest.raises(PlanMismatch):
        verify_function(model, (X[:4],), {}, plan)
    assert model.steps.item() == 0.0


def test_keyword_arguments_are_passed_on() -> None:
    case = mlp_chain(8, layers=2, width=8)
    plan = ebbtide.plan(case.model, (), {"x": case.args[0]}, budget="1MiB")
    assert verify_function(case.model, (), {"x": case.args[0]}, plan).equal


def test_bits_are_compared_not_values() -> None:
    nan, other = torch.tensor([float("nan")]), torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert _same_bits(nan, nan.clone())
    assert not _same_bits(nan, other)
    assert not _same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not _same_bits(torch.zeros(2), torch.zeros(2, 1))
    assert not _same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not _same_bits(torch.zeros(2), None)
    assert _same_bits(torch.zeros(()), torch.zeros(()))
    assert _same_bits(torch.ones(3, 2).t(), torch.ones(2, 3))


def test_the_figures_derive_from_the_bytes() -> None:
    result = Verification((), (), 90, 100, 300, 310, 100)
    assert result.equal
    assert result.within_budget
    assert result.prediction_error == pytest.approx(-0.1)
    assert not replace(result, differences=("output 0",)).equal
    assert not replace(result, budget_above_bytes=99).within_budget


def test_an_error_of_the_model_leaves_the_state() -> None:
    model = Tracked()
    plan = ebbtide.plan(model, (X,), budget="1MiB")
    with pytest.raises((RuntimeError, EbbtideError)):
        verify_function(model, (torch.ones(32, 3),), {}, plan)
    assert model.steps.item() == 0.0
