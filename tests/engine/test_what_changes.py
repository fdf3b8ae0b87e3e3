"""What changes behind a fitted model's back between two steps: seen, with eager's bits."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import BudgetError, CaptureError, UsageError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixed(self.linear(x))


class Net(nn.Module):
    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


PATCHES: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "the model's own class": (Net, "forward", lambda self, x: self.blocks(x).abs().mean()),
    "a submodule's class": (Block, "forward", lambda self, x: torch.sigmoid(self.linear(x))),
    "a method of a submodule's class": (Block, "mixed", lambda self, x: torch.sigmoid(x)),
    "a class of torch's": (nn.Linear, "forward", lambda self, x: x @ self.weight),
    "a container of torch's": (nn.Sequential, "forward", lambda self, x: self[1](x)),
}


def _steps_agree(plain: nn.Module, model: nn.Module, x: torch.Tensor) -> None:
    for each in (plain, model):
        each.zero_grad()
    theirs, ours = plain(x), model(x)
    theirs.backward()
    ours.backward()
    assert torch.equal(theirs, ours)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_a_function_put_on_a_class_is_what_runs(
    patch: tuple[type, str, Callable[..., Any]], before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Net()
    model = ebbtide.fit(copy.deepcopy(plain), "1MiB", options=ebbtide.Options(effort=20))
    x = torch.randn(8, 16)
    for _ in range(before):
        _steps_agree(plain, model, x)
    monkeypatch.setattr(*patch)
    for _ in range(2):
        _steps_agree(plain, model, x)
    monkeypatch.undo()
    _steps_agree(plain, model, x)
    calls = ebbtide.calls_of(model)
    assert calls.planned == before + 3
    assert not calls.unplanned


def test_a_forward_put_on_the_class_of_a_fitted_model_is_refused_at_the_next_step() -> None:
    model = ebbtide.fit(Net(), "1MiB", options=ebbtide.Options(effort=20))
    x = torch.randn(8, 16)
    model(x).backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    type(model).forward = lambda self, x: self.blocks(x).abs().mean()  # type: ignore[method-assign]
    model(x).backward()
    with pytest.raises(UsageError, match="no planned call has made any"):
        optimizer.step()
    other = ebbtide.fit(Net(), "1MiB", options=ebbtide.Options(effort=20))
    other(x).backward()
    assert ebbtide.calls_of(other).planned == 1


def test_a_class_derived_from_a_fitted_models_is_its_makers() -> None:
    model = ebbtide.fit(nn.Linear(4, 4), "1MiB", options=ebbtide.Options(effort=20))
    derived = type("Derived", (type(model),), {})
    derived.weight_of = property(lambda self: 3)  # type: ignore[attr-defined]
    assert not hasattr(nn.Linear, "weight_of")
    del derived.weight_of  # type: ignore[attr-defined]


@contextlib.contextmanager
def _no_onednn() -> Any:
    before = torch.backends.mkldnn.set_flags(_enabled=False)  # its context manager sets what only other devices have
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before[0])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.linear(x).view(2, 32, 2, 24).transpose(1, 2).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v).square().mean()


SETTINGS: dict[str, Callable[[], Any]] = {
    "attention by its definition": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "no oneDNN": _no_onednn,
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_choose_kernels_make_another_step(setting: Callable[[], Any]) -> None:
    plain = Attending()
    model = ebbtide.fit(copy.deepcopy(plain), "10MiB", options=ebbtide.Options(effort=20))
    x = torch.randn(64, 16)
    _steps_agree(plain, model, x)
    first = ebbtide.plan_of(model)
    with setting():
        _steps_agree(plain, model, x)
        assert ebbtide.plan_of(model) is not first
    _steps_agree(plain, model, x)


def test_what_is_added_to_a_loss_inside_is_planned_for() -> None:
    """A penalty on the weights, of which each has a square."""
    plain = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = plain

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).square().mean()

    def step(model: nn.Module) -> None:
        model.zero_grad()
        loss = model(x)
        weights = (p.expand(8, *p.shape) for p in model.parameters())
        penalty = sum((torch.tanh(each * 2).square().sum() for each in weights), torch.zeros(()))
        (loss + penalty).backward()

    x = torch.randn(512, 64)
    case = ebbtide.plan(Loss(), (x,), budget="1000%", options=ebbtide.Options(effort=20))
    model = ebbtide.fit(
        Loss(), case.resident_bytes + case.baseline.above_bytes + 300_000, options=ebbtide.Options(effort=50)
    )
    with pytest.warns(UserWarning, match="outside the model took"):
        step(model)
    for _ in range(3):
        with ebbtide.measure(model, x) as gauge:
            step(model)
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.program.between_bytes > 0
    sums = sum(p.nbytes for p in model.parameters())  # of the penalty's gradients and ours, which autograd makes
    assert gauge.peak_bytes <= plan.budget_bytes + sums


@pytest.mark.filterwarnings("ignore:code outside the model took")
def test_a_smaller_shape_may_take_what_a_share_came_to_before() -> None:
    model = ebbtide.fit(
        nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh()))),
        "80%",
        options=ebbtide.Options(effort=20),
    )
    model(torch.randn(1024, 64)).square().mean().backward()
    granted = ebbtide.plan_of(model)
    model.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    small = ebbtide.plan_of(model)
    assert granted is not None
    assert small is not None
    assert small.predicted_peak_bytes < small.budget_bytes <= granted.budget_bytes
    alone = ebbtide.fit(copy.deepcopy(model), "80%", options=ebbtide.Options(effort=20))
    with pytest.raises(BudgetError):
        alone(torch.randn(16, 64))


def test_a_dispatch_mode_is_refused_by_name_and_the_next_step_is_right() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    plain = Net()
    model = ebbtide.fit(copy.deepcopy(plain), "1MiB", options=ebbtide.Options(effort=20))
    x = torch.randn(8, 16)
    for _ in range(2):
        with FlopCounterMode(display=False), pytest.raises(CaptureError, match="dispatch mode"):
            model(x)
        _steps_agree(plain, model, x)
