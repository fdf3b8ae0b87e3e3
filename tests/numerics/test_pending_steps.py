"""Several forwards before their backwards: planned for once, then steady, within the budget, with eager's bits."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.engine import compiled, plans

ROWS, WIDTH = 512, 64


class Tower(nn.Module):
    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return x.square().mean()


@functools.cache
def unplanned() -> ebbtide.Plan:
    """The plan that keeps everything, of one tower."""
    return ebbtide.plan(Tower(), (rows(0),), budget="1000%", options=ebbtide.Options(effort=100))


@pytest.fixture(autouse=True)
def _nothing_left_of_other_tests() -> None:
    gc.collect()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Captures and plans that were made."""
    counts = {"captures": 0, "plans": 0}

    def counting(name: str, honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return honest(*args, **kwargs)

        return call

    monkeypatch.setattr(compiled, "compile_step", counting("captures", compiled.compile_step))
    monkeypatch.setattr(plans, "make_plan", counting("plans", plans.make_plan))
    return counts


def rows(seed: int, count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def siamese(model: nn.Module, x: list[torch.Tensor]) -> None:
    (model(x[0]) + 2 * model(x[1])).backward()


def first_in_first_out(model: nn.Module, x: list[torch.Tensor]) -> None:
    losses = [model(x[0]), model(x[1])]
    losses[0].backward()
    losses[1].backward()


def triplet(model: nn.Module, x: list[torch.Tensor]) -> None:
    (model(x[0]) + 2 * model(x[1]) - model(x[2])).backward()


def two_sizes(model: nn.Module, x: list[torch.Tensor]) -> None:
    (model(x[0]) + 2 * model(x[1][: ROWS // 2])).backward()


@pytest.mark.filterwarnings("ignore:another forward of this model is in flight")
@pytest.mark.parametrize(
    ("step", "room"),
    [
        *((step, 1.0) for step in (siamese, first_in_first_out, triplet, two_sizes)),
        *((step, 0.55) for step in (first_in_first_out, two_sizes)),
        *(pytest.param(step, 0.55, marks=pytest.mark.long) for step in (siamese, triplet)),
    ],
)
def test_rounds_of_several_forwards_settle_within_the_budget(
    step: Callable[[nn.Module, list[torch.Tensor]], None], room: float, made: dict[str, int]
) -> None:
    plain = Tower()
    one = unplanned()
    count = 3 if step is triplet else 2
    above = one.baseline.above_bytes
    budget = int(one.resident_bytes * count + room * count * above) + 40_000
    model = ebbtide.fit(copy.deepcopy(plain), budget, options=ebbtide.Options(effort=500))
    made.update(captures=0, plans=0)
    settled = 0
    for seed in range(6):
        x = [rows(10 * seed + index) for index in range(count)]
        for each in (model, plain):
            each.zero_grad()
        torch.manual_seed(seed)
        step(plain, x)
        torch.manual_seed(seed)
        if seed < 3:
            step(model, x)
            settled = made["plans"]
        else:
            with ebbtide.measure(model, x) as gauge:
                step(model, x)
            assert gauge.peak_bytes <= budget, (seed, gauge.peak_bytes / budget)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    assert made["plans"] == settled, "plans are made for ever"
    assert made["captures"] == (2 if step is two_sizes else 1)


@pytest.mark.filterwarnings("ignore:a forward of another fitted model is in flight")
@pytest.mark.parametrize("room", [0.6, 1.0])
def test_two_models_leave_room_for_each_other(room: float, made: dict[str, int]) -> None:
    """Both forwards, then both backwards, as in adversarial training: the first model may not fill what both have."""
    plain = [Tower(), Tower()]  # on CPU a budget counts the weights of its own model
    one = unplanned()
    budget = int(one.resident_bytes * 2 + room * 2 * one.baseline.above_bytes) + 40_000
    models = [ebbtide.fit(copy.deepcopy(each), budget, options=ebbtide.Options(effort=500)) for each in plain]
    made.update(captures=0, plans=0)
    settled = 0
    for seed in range(7):
        x = [rows(10 * seed + index) for index in range(2)]
        for pair in (plain, models):
            for each in pair:
                each.zero_grad()
            torch.manual_seed(seed)
            if seed < 3 or pair is plain:
                (pair[0](x[0]) + 2 * pair[1](x[1])).backward()
                settled = made["plans"]
                continue
            with ebbtide.measure(pair[0], x) as gauge:  # the second model's weights are none of the first's budget
                (pair[0](x[0]) + 2 * pair[1](x[1])).backward()
            assert gauge.peak_bytes <= budget, (seed, gauge.peak_bytes / budget)
        for mine, theirs in zip(models, plain, strict=True):
            for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    assert made["plans"] == settled, "plans are made for ever"
    assert made["captures"] == 2


@pytest.mark.parametrize("budget", ["100%", "101%"])
def test_the_unplanned_peak_is_always_enough(budget: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Flatten(0), nn.Linear(32, 1))
    ebbtide.fit(model, budget)
    for seed in range(3):
        model(torch.randn(4, 8)).backward()
        model.zero_grad()
        plan = ebbtide.plan_of(model)
        assert plan is not None
        assert plan.overhead == 0, seed
    assert ebbtide.plan(nn.Sequential(nn.Linear(2, 1)), (torch.zeros(1, 2),), budget=budget).overhead == 0
