"""Training under a budget is training: losses and parameters bit-equal to eager's over several optimizer steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ebbtide
from ebbtide.errors import BudgetError
from ebbtide.zoo import mlp_chain

Train = Callable[[torch.nn.Module, torch.optim.Optimizer], list[float]]


def three_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses: list[float] = []
    torch.manual_seed(5)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(128, 32))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def accumulating(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses: list[float] = []
    torch.manual_seed(5)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            loss = model(torch.randn(128, 32))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def same_parameters(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("reserved", [True, False], ids=["optimizer given", "optimizer not given"])
@pytest.mark.parametrize("train", [three_steps, accumulating])
def test_training_is_bit_equal_to_eager(study: Any, train: Train, reserved: bool) -> None:
    subject = study("mlp_chain with dropout")
    plain = copy.deepcopy(subject.case.model)
    planned = copy.deepcopy(subject.case.model)
    optimizer = adamw(planned)
    parameters = sum(p.nbytes for p in planned.parameters())
    # Gradients and two moments per parameter come to be resident, and the proof keeps a generator state twice.
    state = 3 * parameters + 40_000
    budget = subject.at(0.4).budget_bytes + state
    ebbtide.fit(planned, budget, optimizer=optimizer if reserved else None)
    assert train(planned, optimizer) == train(plain, adamw(plain))
    assert same_parameters(planned, plain)
    step = ebbtide.step_of(planned)
    assert step is not None
    assert step.plan is not None
    assert step.plan.predicted_peak_bytes <= budget


def test_every_step_is_measured_once_and_within_the_prediction(study: Any) -> None:
    subject = study("gpt with dropout")
    model = copy.deepcopy(subject.case.model)
    ebbtide.fit(model, subject.at(0.4).budget_bytes + 20_000)
    for _ in range(3):
        model.zero_grad()
        model(*subject.case.args).backward()
    step = ebbtide.step_of(model)
    assert step is not None
    assert step.plan is not None
    assert step.verified_buffers > 0
    assert step.measured_above_bytes is not None
    assert abs(step.measured_above_bytes - step.plan.timeline.above_bytes) <= 64


def test_state_that_appears_is_planned_around() -> None:
    case = mlp_chain(256, layers=6, width=32)
    unplanned = ebbtide.plan(case.model, case.args, budget="1000%")
    optimizer = adamw(case.model)
    # Room for the unplanned step now, not once moments and gradients are there.
    ebbtide.fit(
        case.model, unplanned.baseline_peak_bytes + 20_000, optimizer=optimizer, options=ebbtide.Options(verify=False)
    )
    case.model(*case.args).backward()
    before = ebbtide.plan_of(case.model)
    optimizer.step()
    case.model(*case.args).backward()
    after = ebbtide.plan_of(case.model)
    assert before is not None
    assert after is not None
    assert after.resident_bytes > before.resident_bytes
    assert after.predicted_peak_bytes <= after.budget_bytes
    assert before.predicted_peak_bytes <= before.budget_bytes


def test_growth_beyond_the_budget_is_refused_before_the_step_runs() -> None:
    case = mlp_chain(128, layers=6, width=64)
    ahead = ebbtide.plan(case.model, case.args, budget="1000%")
    growth = sum(p.numel() * p.element_size() for p in case.model.parameters())
    assert growth > 2 * (ahead.smallest_bytes - ahead.floor_bytes)  # what no better search makes up for
    ebbtide.fit(case.model, ahead.smallest_bytes + 64)
    case.model(*case.args).backward()
    gradients = [p.grad.clone() for p in case.model.parameters() if p.grad is not None]
    state = torch.get_rng_state()
    with pytest.raises(BudgetError, match="no plan within the budget"):  # the gradients are resident now
        case.model(*case.args)
    assert torch.equal(torch.get_rng_state(), state)
    for before, parameter in zip(gradients, case.model.parameters(), strict=True):
        assert torch.equal(before, parameter.grad)  # type: ignore[arg-type]
    case.model.zero_grad()
    case.model(*case.args).backward()
