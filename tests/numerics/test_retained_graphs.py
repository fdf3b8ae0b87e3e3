"""``retain_graph=True``: the first step that does tells, later ones are planned with room, with eager's bits."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.engine import plans as plans_of_steps
from ebbtide.errors import BudgetError

ROWS, WIDTH = 512, 64

# What the first step took over its budget is said once more, with figures, when it is judged.
pytestmark = pytest.mark.filterwarnings("ignore:.* so that this step took .*:UserWarning")


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return x.square().mean(), x.abs().mean()


@pytest.fixture(autouse=True)
def _nothing_left_of_other_tests() -> None:
    gc.collect()


def once(one: torch.Tensor, other: torch.Tensor) -> None:
    (one + other).backward(retain_graph=True)


def twice(one: torch.Tensor, other: torch.Tensor) -> None:
    (one + other).backward(retain_graph=True)
    (one + other).backward()


def one_after_the_other(one: torch.Tensor, other: torch.Tensor) -> None:
    one.backward(retain_graph=True)
    other.backward()


def three_times(one: torch.Tensor, other: torch.Tensor) -> None:
    for last in (False, False, True):
        (one + other).backward(retain_graph=not last)


@functools.cache
def _unplanned() -> ebbtide.Plan:
    return ebbtide.plan(Tower(), (torch.randn(ROWS, WIDTH),), budget="1000%", options=ebbtide.Options(effort=100))


def _plain() -> tuple[nn.Module, int, int]:
    """A model, what is resident before its step, and what its unplanned step takes above that."""
    return Tower(), _unplanned().resident_bytes, _unplanned().baseline.above_bytes


@pytest.mark.parametrize(
    ("backwards", "first"), [(once, 0), (twice, 0), (twice, 2), (one_after_the_other, 0), (three_times, 1)]
)
def test_from_the_second_step_on_there_is_room(
    backwards: Callable[[torch.Tensor, torch.Tensor], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, resident, above = _plain()
    budget = resident + int(0.8 * above) + 20_000
    plans: list[int] = []
    honest = plans_of_steps.make_plan

    def counted(*args: Any, **kwargs: Any) -> Any:
        plans.append(kwargs["reserve_bytes"])
        return honest(*args, **kwargs)

    monkeypatch.setattr(plans_of_steps, "make_plan", counted)
    model = ebbtide.fit(copy.deepcopy(plain), budget, options=ebbtide.Options(effort=50))
    settled = 0
    for step in range(first + 4):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        how = backwards if step >= first else lambda one, other: (one + other).backward()
        for each in (plain, model):
            each.zero_grad()
        torch.manual_seed(step)
        how(*plain(x))
        torch.manual_seed(step)
        if step == first:
            with pytest.warns(UserWarning, match="retains its graph"):
                how(*model(x))
        elif step == first + 1:  # is planned here
            how(*model(x))
            settled = len(plans)
        else:
            with warnings.catch_warnings(), ebbtide.measure(model, x) as gauge:
                warnings.simplefilter("error")
                how(*model(x))
            assert gauge.peak_bytes <= budget, (step, gauge.peak_bytes / budget)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    assert len(plans) == settled, "plans are made for ever"


def test_where_there_is_no_room_that_is_said_and_what_is_named_has_it() -> None:
    plain, _, _ = _plain()
    model = ebbtide.fit(copy.deepcopy(plain), _unplanned().smallest_bytes + 20_000, options=ebbtide.Options(effort=100))
    x = torch.randn(ROWS, WIDTH)
    with pytest.warns(UserWarning, match="retains its graph"):
        twice(*model(x))
    model.zero_grad()
    with pytest.raises(BudgetError, match="retain_graph=True") as refused:
        model(x)
    ebbtide.set_budget(model, refused.value.smallest_bytes)
    for _ in range(2):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            twice(*model(x))
    torch.manual_seed(3)
    model.zero_grad()
    twice(*model(x))
    torch.manual_seed(3)
    twice(*plain(x))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_a_budget_with_room_for_everything_changes_nothing() -> None:
    plain, _, _ = _plain()
    model = ebbtide.fit(copy.deepcopy(plain), "1GiB")
    x = torch.randn(ROWS, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            twice(*model(x))
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.overhead == 0
