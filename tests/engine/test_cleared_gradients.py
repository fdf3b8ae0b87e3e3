"""Gradients of earlier steps that go between a forward and its backward, or do not."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.torch_seams.patches import open_patches

WIDTH, ROWS = 256, 16
OPTIONS = ebbtide.Options(effort=100)


class Model(nn.Module):
    """Small batches and large weights: gradients are most of what a step takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def rows(count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))


def parameters(model: nn.Module) -> int:
    return sum(each.nbytes for each in model.parameters())


def peaks(model: nn.Module) -> tuple[int, int]:
    plan = ebbtide.plan_of(model)
    assert plan is not None
    return plan.resident_bytes, plan.predicted_peak_bytes


def tight() -> int:
    """With room for weights and gradients once, and half of them again."""
    return parameters(Model()) * 5 // 2


CLEAR: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
}


@pytest.mark.parametrize("how", CLEAR)
def test_gradients_that_go_before_the_backward_do_not_count_beside_the_new(how: str) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ebbtide.fit(model, tight(), optimizer=optimizer, options=OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            loss = model(rows(ROWS + 8 * (step == 4)))  # a step of another shape goes by what these have told
            CLEAR[how](model, optimizer)
            loss.backward()
            optimizer.step()
    resident, peak = peaks(model)
    assert resident >= 2 * parameters(model)
    assert peak <= tight()
    assert open_patches() == 0


def test_without_a_call_that_says_so_the_second_step_is_refused_with_what_helps() -> None:
    model = ebbtide.fit(Model(), tight(), options=OPTIONS)
    loss = model(rows())
    loss.backward()
    with pytest.raises(ebbtide.errors.BudgetError) as refused:
        model(rows())
    notes = "\n".join(refused.value.__notes__)
    assert "zero them before the forward" in notes
    model.zero_grad()
    model(rows()).backward()


def test_gradients_that_are_replaced_by_hand_are_seen_to_go() -> None:
    model = ebbtide.fit(Model(), 4 * parameters(Model()), options=OPTIONS)
    for _ in range(3):
        loss = model(rows())
        for each in model.parameters():
            each.grad = None
        loss.backward()
        del loss
    ebbtide.set_budget(model, tight())
    loss = model(rows())
    model.zero_grad()
    loss.backward()
    assert peaks(model)[1] <= tight()


def test_a_step_that_keeps_them_after_all_is_said_and_counted_on_no_more() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ebbtide.fit(model, tight(), optimizer=optimizer, options=OPTIONS)
    for _ in range(3):
        loss = model(rows())
        optimizer.zero_grad()
        loss.backward()
    loss = model(rows())
    with pytest.warns(UserWarning, match="gradients of earlier steps are there in this backward"):
        loss.backward()
    with pytest.raises(ebbtide.errors.BudgetError):
        model(rows())
    optimizer.zero_grad()
    model(rows()).backward()


@pytest.mark.parametrize("zeros", [True, False])
def test_gradients_set_to_zeros_or_of_some_parameters_are_not_said_to_go(zeros: bool) -> None:
    model = Model()
    own = list(model.parameters())
    some = torch.optim.SGD(own if zeros else own[:2], 0.1)
    ebbtide.fit(model, tight(), options=OPTIONS)
    loss = model(rows())
    some.zero_grad(set_to_none=not zeros)
    loss.backward()
    with pytest.raises(ebbtide.errors.BudgetError):
        model(rows())


def test_micro_batches_are_added_up_within_the_budget_where_the_first_is_zeroed_late() -> None:
    """``loss = model(x); if first: zero_grad(); loss.backward()``: with room, no step counts on what one call says."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ebbtide.fit(model, 5 * parameters(model), optimizer=optimizer, options=OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            loss = model(rows())
            if step % 3 == 0:
                optimizer.zero_grad()
            loss.backward()
