"""A handful of captured steps for the quick tier: the bits are eager's, and the peak is within the budget."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebbtide
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide.zoo import GPTConfig, gpt, mlp_chain

EFFORT = 200
BATCHES = 4


class Images(nn.Module):
    """Convolutions with batch norm, whose running statistics every step changes, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before in (3, *[8] * 5):
            layers += [nn.Conv2d(before, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(self.layers(images).mean((2, 3)))
        return F.cross_entropy(scores, images.new_zeros(len(images), dtype=torch.int64)), scores


def chain() -> ebbtide.Case:
    return mlp_chain(256, layers=8, width=32, dropout=0.1)


def transformer() -> ebbtide.Case:
    return gpt(4, GPTConfig(vocabulary=64, length=32, layers=2, width=32, heads=2, dropout=0.1))


def images() -> ebbtide.Case:
    return ebbtide.Case(Images(), (torch.randn(8, 3, 16, 16),))


def train(model: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], list[int]]:
    """Losses, gradients, parameters and buffers of steps of two batches each; and the peaks but for the first."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[torch.Tensor] = []
    peaks: list[int] = []
    for batch in range(BATCHES):
        gauge = ebbtide.measure(model, args) if batch else None  # no profiler while costs are measured
        with gauge or contextlib.nullcontext():
            outputs = model(*args)
            loss = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
            loss.backward()
            losses.append(loss.detach().clone())
        if gauge is not None:
            peaks.append(gauge.peak_bytes)
        if batch % 2:
            optimizer.step()
            if batch + 1 < BATCHES:
                optimizer.zero_grad()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*losses, *gradients, *model.state_dict().values()], peaks


@pytest.mark.parametrize("make", [chain, transformer, images])
def test_training_in_a_budget_is_training(make: Callable[[], ebbtide.Case]) -> None:
    torch.manual_seed(1)
    case = make()
    eager, fitted = copy.deepcopy(case.model), case.model
    expected, unplanned_peaks = train(eager, case.args)
    parameters = sum(p.nbytes for p in fitted.parameters())
    budget = int(0.75 * max(unplanned_peaks)) + 2 * parameters  # gradients accumulate; some is held in reserve
    ebbtide.fit(fitted, budget, options=ebbtide.Options(effort=EFFORT, verify=False))
    found, peaks = train(fitted, case.args)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert max(peaks) <= budget < max(unplanned_peaks)
    plan = ebbtide.plan_of(fitted)
    assert plan is not None
    assert plan.schedule != unplanned_schedule(plan.program), "nothing is recomputed: the budget tests nothing"


def test_the_proof_and_the_measurement_of_first_steps_find_nothing() -> None:
    case = transformer()
    plan = ebbtide.plan(case.model, case.args, budget="70%", options=ebbtide.Options(effort=EFFORT))
    ebbtide.fit(
        case.model,
        plan.budget_bytes + 2 * sum(p.nbytes for p in case.model.parameters()),
        options=ebbtide.Options(effort=EFFORT),
    )
    for _ in range(3):
        case.model.zero_grad()
        case.model(*case.args).backward()
    step = ebbtide.step_of(case.model)
    assert step is not None
    assert step.measured_above_bytes is not None
