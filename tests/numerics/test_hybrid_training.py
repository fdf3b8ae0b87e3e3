"""``fit(tiers=...)``: training past a budget through the disk, planned by the default planner."""

from __future__ import annotations

import copy
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.engine.fitted_class import FITTED
from ebbtide.engine.pending_steps import returned_tensors
from ebbtide.errors import BudgetError, PlanMismatch, TierError, UsageError
from ebbtide.transfers import links
from ebbtide.zoo import GPTConfig, gpt


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that make moving worth it whatever this machine's disk does, and small tensors worth moving."""
    measured = links._Measured(4e10, 4e10, 1e-6, 0.0)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(links, "_measure", lambda _: measured)
    monkeypatch.setattr(links, "_LEAST_BYTES", 256)


class Box:
    """Nothing that torch knows, and without a dictionary."""

    __slots__ = "loss"

    def __init__(self, loss: Any) -> None:
        self.loss = loss


class Boxed(nn.Sequential):
    depth = 0

    def forward(self, input: torch.Tensor) -> Any:
        loss = super().forward(input)
        for _ in range(self.depth):
            loss = Box(loss)
        return loss


class MeanSquare(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def subject() -> Any:
    torch.manual_seed(0)
    return gpt(4, GPTConfig(vocabulary=64, length=32, layers=1, width=32, heads=2, dropout=0.1, tied=True))


def assert_trains(model: nn.Module, eager: nn.Module, args: tuple[Any, ...], steps: int = 3) -> None:
    for _ in range(steps):
        state = torch.get_rng_state()
        for each in (model, eager):
            each.zero_grad()
            torch.set_rng_state(state)
            each(*args).backward()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)


def test_a_budget_that_recomputing_cannot_keep_is_kept_by_moving(tmp_path: Path) -> None:
    case = subject()
    disk = tmp_path / "disk"
    disk.mkdir()
    alone = ebbtide.plan(case.model, case.args, budget="100%", options=ebbtide.Options(effort=100))
    moving = ebbtide.plan(
        case.model, case.args, budget="100%", options=ebbtide.Options(effort=100, tiers=f"disk:{disk}")
    )
    assert moving.smallest_bytes < alone.smallest_bytes
    budget = moving.smallest_bytes + (alone.smallest_bytes - moving.smallest_bytes) // 2
    with pytest.raises(BudgetError):
        ebbtide.plan(case.model, case.args, budget=budget, options=ebbtide.Options(effort=100, rewrites="none"))
    eager = copy.deepcopy(case.model)
    model = ebbtide.fit(case.model, budget, tiers=[f"disk:{disk}"])
    assert_trains(model, eager, case.args)
    step = ebbtide.step_of(model)
    assert step is not None
    assert step.plan is not None
    assert step.plan.tiers == ("disk",)
    assert step.plan.predicted_peak_bytes <= budget
    assert step.traffic is not None
    assert step.traffic.in_bytes > 0
    assert step.measured_above_bytes is not None
    assert abs(step.measured_above_bytes - step.plan.timeline.above_bytes) <= 64
    assert "to the disk in" in step.plan.details
    assert list(disk.iterdir()) == []


def test_a_plan_that_moves_is_no_slower_than_one_that_recomputes(tmp_path: Path) -> None:
    case = subject()
    budget = "60%"
    alone = ebbtide.plan(case.model, case.args, budget=budget, options=ebbtide.Options(effort=300))
    moving = ebbtide.plan(
        case.model, case.args, budget=budget, options=ebbtide.Options(effort=300, tiers=f"disk:{tmp_path}")
    )
    assert moving.overhead <= alone.overhead
    assert "tiers: disk" in moving.bound_class


@pytest.mark.filterwarnings("ignore:code outside the model took")
def test_a_loss_outside_is_learned_under_plans_that_move(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())))
    eager, x = copy.deepcopy(model), torch.randn(256, 64)
    ebbtide.fit(model, "60%", tiers=f"disk:{tmp_path}")
    for _ in range(4):
        for each in (model, eager):
            each.zero_grad()
            (each(x) ** 2).mean().backward()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)


def test_inside_of_a_checkpoint_nothing_moves_and_the_numbers_are_right(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any) -> Any:
            return checkpoint(self.inner, *args, use_reentrant=False)

    case = subject()
    eager = copy.deepcopy(case.model)
    model = ebbtide.fit(case.model, "95%", tiers=f"disk:{tmp_path}")
    assert_trains(Outer(model), Outer(eager), case.args, steps=2)
    step = ebbtide.step_of(model)
    assert step is not None
    assert step.plan is not None
    assert not step.plan.schedule.moves


@pytest.mark.filterwarnings("ignore:another forward of this model")
@pytest.mark.parametrize("order", ["hooked last", "hooked first"])
def test_a_forward_under_hooks_beside_one_that_moves(tmp_path: Path, order: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())), MeanSquare())
    eager, x = copy.deepcopy(model), torch.randn(256, 64, requires_grad=True)
    ebbtide.fit(model, "70%", tiers=f"disk:{tmp_path}", options=ebbtide.Options(effort=200))
    assert_trains(model, eager, (x,), steps=1)
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.schedule.moves

    def step(each: nn.Module) -> None:
        calls = [lambda: each(x), lambda: checkpoint(each, x, use_reentrant=False)]
        one, other = (call() for call in (calls if order == "hooked last" else calls[::-1]))
        (one + other).backward()

    for each in (model, eager):
        each.zero_grad()
        step(each)
        step(each)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:another forward of this model")
def test_losses_that_no_walk_finds(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Boxed(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())), MeanSquare())
    model.depth, x = 5, torch.randn(256, 64)
    ebbtide.fit(model, "60%", tiers=f"disk:{tmp_path}", options=ebbtide.Options(effort=100))
    pending = FITTED[model].pending
    pending.without_node = deque(maxlen=1)
    first, second = model(x), model(x)
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.schedule.moves
    with pytest.raises(TierError, match="one of too many whose backward has not come"):
        first.loss.loss.loss.loss.loss.backward()
    second.loss.loss.loss.loss.loss.backward()


def test_tensors_in_objects_with_slots_are_found() -> None:
    loss = torch.zeros(1)
    assert [each is loss for each in returned_tensors((Box(Box(loss)), Box(None)))] == [True]


def test_a_budget_after_a_given_plan_moves_to_the_tiers_of_the_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())), MeanSquare())
    eager, x = copy.deepcopy(model), torch.randn(256, 64)
    disk = f"disk:{tmp_path}"
    plan = ebbtide.plan(model, (x,), budget="60%", options=ebbtide.Options(effort=100, tiers=disk))
    ebbtide.fit(model, plan, tiers=disk, options=ebbtide.Options(effort=100))
    for budget in ("55%", plan):
        ebbtide.set_budget(model, budget)
        assert_trains(model, eager, (x,), steps=1)
        running = ebbtide.plan_of(model)
        assert running is not None
        assert running.schedule.moves


def test_a_plan_that_moves_is_refused_where_its_tier_is_not(tmp_path: Path) -> None:
    case = subject()
    plan = ebbtide.plan(
        case.model, case.args, budget="60%", options=ebbtide.Options(effort=100, tiers=f"disk:{tmp_path}")
    )
    assert plan.schedule.moves
    model = ebbtide.fit(case.model, "100%")
    with pytest.raises(PlanMismatch, match="moves tensors to disk, and the model was fitted without tiers"):
        ebbtide.set_budget(model, plan)
    with pytest.raises(PlanMismatch, match="does not name that"):
        ebbtide.fit(copy.deepcopy(model), plan, tiers=[])
    assert ebbtide.calls_of(model).planned == 0


def test_the_hosts_memory_is_refused_before_anything_is_fitted() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="memory of a CPU is the host's"):
        ebbtide.fit(model, "100%", tiers="host")
    ebbtide.fit(model, "100%")


def test_a_machine_without_the_tier_is_refused_by_name() -> None:
    case = subject()
    with pytest.raises(UsageError, match=r"a100-80gb' has no link to tier disk; it has: host"):
        ebbtide.plan(case.model, case.args, budget="60%", machine="a100-80gb", options=ebbtide.Options(tiers="disk"))
    plan = ebbtide.plan(
        case.model, case.args, budget="64MiB", machine="a100-80gb", options=ebbtide.Options(tiers="host", effort=100)
    )
    assert plan.tiers == ("host",)
