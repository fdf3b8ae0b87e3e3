"""Ops that nobody can look into run once in a step, unless they are declared to give the same bits again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import CaptureError, UsageError
from ebbtide.step.schedule import Compute

RUNS: list[int] = []


@torch.library.custom_op("foreign_lib::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    RUNS.append(1)
    return x * (1 + 0.125 * (len(RUNS) % 2))


@torch.library.custom_op("foreign_lib::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * torch.rand(x.shape)


@torch.library.custom_op("foreign_lib::plain", mutates_args=())
def plain(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


@torch.library.custom_op("foreign_lib::named", mutates_args=())
def named(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


for each in (counted, noisy, plain):
    each.register_fake(torch.empty_like)
    each.register_autograd(lambda context, gradient: gradient * 0.5)


class Layers(nn.Module):
    def __init__(self, op: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(self.op(torch.sigmoid(layer(x))))
        return x.square().mean()


def trained(model: nn.Module) -> list[Any]:
    torch.manual_seed(1)
    x = torch.randn(256, 32)
    found: list[Any] = []
    for _ in range(3):
        RUNS.clear()
        loss = model(x)
        loss.backward()
        found += [loss.detach().clone(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
        found.append(torch.get_rng_state())
        model.zero_grad()
    return found


def runs_of(model: nn.Module) -> list[int]:
    """Of each foreign op in the plan."""
    plan = ebbtide.plan_of(model)
    assert plan is not None
    ops = [i for i, op in enumerate(plan.program.ops) if op.target.startswith("foreign_lib.")]
    return [sum(isinstance(a, Compute) and a.op == i for a in plan.schedule.actions) for i in ops]


@pytest.mark.parametrize("op", [counted, noisy, plain], ids=["counted", "noisy", "plain"])
def test_they_run_once_with_eagers_numbers(op: Callable[..., torch.Tensor]) -> None:
    model = Layers(op)
    eager = trained(Layers(op))
    ebbtide.fit(model, "70%", progress=None)
    planned = trained(model)
    if op is counted:  # timing it has counted too, so that its first step starts elsewhere
        eager, planned = (each[len(each) // 3 :] for each in (eager, planned))
    assert all(map(torch.equal, planned, eager))
    assert runs_of(model) == [1] * 6
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert any(runs > 1 for runs in plan.timeline.runs), "nothing was recomputed"


def test_one_that_is_declared_repeatable_runs_again() -> None:
    @torch.library.custom_op("foreign_lib::declared", mutates_args=())
    def declared(x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    declared.register_fake(torch.empty_like)
    declared.register_autograd(lambda context, gradient: gradient * 0.5)
    assert ebbtide.repeatable(declared) is declared
    model = Layers(declared)
    eager = trained(Layers(declared))
    ebbtide.fit(
        model,
        ebbtide.plan(
            model, (torch.randn(256, 32),), budget="100%", options=ebbtide.Options(progress=None)
        ).smallest_bytes
        + 9000,
    )
    assert all(map(torch.equal, trained(model), eager))
    assert max(runs_of(model)) > 1


@pytest.mark.parametrize("given", ["foreign_lib::named", "foreign_lib.named.default"])
def test_an_op_is_declared_by_any_of_its_names(given: str) -> None:
    op = torch.ops.foreign_lib.named
    for each in (given, op, op.default, named):
        assert ebbtide.repeatable(each) is each


@pytest.mark.parametrize("given", ["plain", "foreign_lib::missing", len, 3, ""])
def test_what_is_no_op_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="repeatable takes an op that is registered"):
        ebbtide.repeatable(given)


@torch.library.triton_op("foreign_lib::of_triton", mutates_args=())
def of_triton(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


of_triton.register_autograd(lambda context, gradient: of_triton(gradient))


def test_an_op_of_tritons_is_planned_as_a_whole() -> None:
    """Torch would take it apart, into launches that return nothing."""
    eager = trained(Layers(of_triton))
    model = ebbtide.fit(Layers(of_triton), "85%", progress=None)
    assert all(map(torch.equal, trained(model), eager))
    assert runs_of(model) == [1] * 12


@torch.library.custom_op("foreign_lib::in_a_circle", mutates_args=())
def in_a_circle(x: torch.Tensor) -> torch.Tensor:
    circle: list[Any] = [made := x.tanh()]
    circle.append(circle)
    return made


@torch.library.custom_op("foreign_lib::keeps", mutates_args=())
def keeps(x: torch.Tensor) -> torch.Tensor:
    KEPT.append(made := x.tanh())
    return made


KEPT: list[torch.Tensor] = []
for each in (in_a_circle, keeps):
    each.register_fake(torch.empty_like)
    each.register_autograd(lambda context, gradient: gradient * 0.5)


@pytest.mark.parametrize("op", [in_a_circle, keeps], ids=["in_a_circle", "keeps"])
def test_one_that_keeps_memory_of_its_runs_is_refused_by_name(op: Callable[..., torch.Tensor]) -> None:
    """What nobody counts would exceed any budget."""
    model = ebbtide.fit(Layers(op), "100%", progress=None)
    with pytest.raises(CaptureError, match=r"32\.00 KiB of a run are in use when its result is not any more"):
        model(torch.randn(256, 32))
    assert not ebbtide.calls_of(model).planned
    KEPT.clear()


@torch.library.triton_op("foreign_lib::of_values", mutates_args=())
def of_values(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float(x.data_ptr() > 0))


def test_a_kernel_that_needs_values_in_a_trace_is_refused_by_name() -> None:
    model = ebbtide.fit(Layers(of_values), "100%", progress=None)
    with pytest.raises(CaptureError, match=r"Register what launches it as an op"):
        model(torch.randn(256, 32))
