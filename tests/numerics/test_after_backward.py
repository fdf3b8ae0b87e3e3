"""What hooks on parameters take after the planned backward has room in the budget, or the budget is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebbtide

TOKENS, LABELS = torch.arange(64), torch.arange(64) % 8
TABLE_BYTES = 2000 * 64 * 4


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(2000, 64), nn.Linear(64, 8)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.table(tokens)), labels)


def masked(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    gradient[:1000] = 0
    return gradient


def replaced(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = masked(parameter.grad)


def peak_of(model: nn.Module) -> int:
    model.zero_grad()
    with ebbtide.measure(model, TOKENS, LABELS) as gauge:
        model(TOKENS, LABELS).backward()
    return gauge.peak_bytes


def budget_of(model: nn.Module) -> int:
    plan = ebbtide.plan_of(model)
    assert plan is not None
    return plan.budget_bytes


def step(model: nn.Module) -> None:
    model.zero_grad()
    model(TOKENS, LABELS).backward()


@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
def test_a_share_is_of_the_step_with_its_hooks(kind: str) -> None:
    model = ebbtide.fit(Table(), "100%", options=ebbtide.Options(effort=100))
    step(model)
    step(model)
    if kind == "gradient":  # hooks that come late are learned of like others
        model.table.weight.register_hook(masked)
    else:
        model.table.weight.register_post_accumulate_grad_hook(replaced)
    before = budget_of(model)
    with pytest.warns(UserWarning, match="hooks on parameters"):
        step(model)
    step(model)  # a second look
    assert before < peak_of(model) <= budget_of(model)


def test_a_budget_without_room_for_hooks_is_refused_and_the_smallest_works() -> None:
    model = Table()
    model.table.weight.register_hook(masked)
    ebbtide.fit(model, 1_200_000, options=ebbtide.Options(effort=100))
    with pytest.warns(UserWarning, match="hooks on parameters"):
        step(model)
    with pytest.raises(ebbtide.errors.BudgetError, match="after the planned backward") as refused:
        step(model)
    ebbtide.set_budget(model, refused.value.smallest_bytes)
    step(model)
    assert peak_of(model) <= refused.value.smallest_bytes


def test_an_optimizer_in_the_backward_makes_its_state_once() -> None:
    """What a first step leaves is not taken again."""
    model = Table()
    optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}

    def update(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    ebbtide.fit(model, 7 * TABLE_BYTES, options=ebbtide.Options(effort=100))
    for _ in range(4):
        step(model)
    calls = ebbtide.calls_of(model)
    assert calls.planned == 4
