"""Another shape, mode or attribute is another program: planned anew or refused, never run unplanned or mixed up."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.engine import captured_steps
from ebbtide.errors import CaptureError
from ebbtide.zoo import mlp_chain


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.scale = 1.0
        self.calls = 0

    def forward(self, x: torch.Tensor, power: int = 2) -> torch.Tensor:
        return (self.drop(self.linear(x)) * self.scale).tanh().pow(power).mean()


class Counting(Scaled):
    def forward(self, x: torch.Tensor, power: int = 2) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, power) * self.calls


def loss_and_gradient(model: nn.Module, x: torch.Tensor, *args: int) -> tuple[float, torch.Tensor | None]:
    model.zero_grad()
    torch.manual_seed(2)
    loss = model(x, *args)
    loss.backward()
    gradient = model.linear.weight.grad  # type: ignore[union-attr]
    return loss.item(), None if gradient is None else gradient.clone()  # type: ignore[operator]


def assert_same(fitted: nn.Module, plain: nn.Module, x: torch.Tensor, *args: int) -> None:
    (loss, gradient), (expected, other) = (loss_and_gradient(m, x, *args) for m in (fitted, plain))
    assert loss == expected
    assert (gradient is None) == (other is None)
    assert gradient is None or torch.equal(gradient, other)  # type: ignore[arg-type]
    step = ebbtide.step_of(fitted)
    assert step is not None
    assert step.forward_calls > 0


def twins(kind: type[Scaled] = Scaled) -> tuple[Scaled, Scaled]:
    model = kind()
    return ebbtide.fit(copy.deepcopy(model), "1MiB"), model


@pytest.mark.long
def test_twenty_shapes_have_twenty_plans() -> None:
    model = mlp_chain(8, layers=1, width=4).model
    ebbtide.fit(model, "1MiB")
    plans: set[int] = set()
    for rows in range(1, 21):
        model(torch.randn(rows, 4)).backward()
        step, plan = ebbtide.step_of(model), ebbtide.plan_of(model)
        assert step is not None
        assert plan is not None
        assert step.forward_calls == 1
        plans.add(id(plan))
    assert len(plans) == 20
    model(torch.randn(7, 4)).backward()
    assert id(ebbtide.plan_of(model)) in plans


def test_attribute_that_changes_back_and_forth() -> None:
    fitted, plain = twins()
    for scale in (1.0, 2.0, 1.0, 3.0, 2.0):
        fitted.scale = plain.scale = scale
        assert_same(fitted, plain, torch.ones(4, 8))


@pytest.mark.filterwarnings("ignore:another forward of this model is in flight")
def test_attribute_that_changes_while_a_backward_is_pending() -> None:
    fitted, plain = twins()
    for model in (fitted, plain):
        torch.manual_seed(2)
        first = model(torch.ones(4, 8))
        model.scale = 2.0
        second = model(torch.ones(4, 8))
        first.backward()
        second.backward()
    assert torch.equal(fitted.linear.weight.grad, plain.linear.weight.grad)  # type: ignore[arg-type]


@pytest.mark.long
def test_attribute_that_changes_in_every_call_is_warned_about() -> None:
    fitted, plain = twins(Counting)
    for _ in range(7):
        assert_same(fitted, plain, torch.ones(4, 8))
    with pytest.warns(UserWarning, match="captured 8 times for the same inputs.*register_buffer"):
        assert_same(fitted, plain, torch.ones(4, 8))
    for _ in range(2):  # more than Dynamo's limit of recompilations
        assert_same(fitted, plain, torch.ones(4, 8))
    assert fitted.calls == 10


def steps(model: Any) -> None:
    model.log.append(1)


def names(model: Any) -> None:
    model.log[str(len(model.log))] = 1


def numbers(model: Any) -> None:
    model.log.add(len(model.log))


def count(model: Any) -> None:
    model.log += 1


def recent(model: Any) -> None:
    model.log.append(1)
    if len(model.log) > 2:
        model.log.pop(0)


class Logging(nn.Module):
    def __init__(self, log: Any, note: Callable[[Any], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.log, self.note = log, note

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note(self)
        return self.linear(x).square().mean()


@pytest.mark.filterwarnings("ignore:Logging has been captured")
@pytest.mark.parametrize(("empty", "note"), [([], steps), ({}, names), (set(), numbers), (0, count), ([], recent)])
def test_what_grows_in_every_call_settles_or_is_refused_by_name(
    empty: Any, note: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_steps, "MOST_IN_A_ROW", 3)
    model = Logging(copy.copy(empty), note)
    plain = copy.deepcopy(model)
    ebbtide.fit(model, "1GiB")

    def step(each: nn.Module) -> list[torch.Tensor]:
        loss = each(torch.ones(4, 8))
        return [loss, *torch.autograd.grad(loss, list(each.parameters()))]

    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(step(model), step(plain), strict=True))
        assert model.log == plain.log
    if note in (recent, count):
        for _ in range(3):
            step(model)
    else:
        with pytest.raises(CaptureError, match=r"(?s)register_buffer.*captured 3 times.*captured where .*self\.log"):
            step(model)
        assert model.log == plain.log
        model.log = copy.copy(empty)  # what is known still serves
        step(model)
    assert not ebbtide.calls_of(model).unplanned


def test_mode_of_a_submodule() -> None:
    fitted, plain = twins()
    for mode in (True, False, True):
        fitted.drop.train(mode)
        plain.drop.train(mode)
        assert_same(fitted, plain, torch.ones(4, 8))


def test_parameter_that_is_frozen_and_thawed() -> None:
    fitted, plain = twins()
    for wanted in (True, False, True):
        fitted.linear.weight.requires_grad_(wanted)
        plain.linear.weight.requires_grad_(wanted)
        assert_same(fitted, plain, torch.ones(4, 8))


def test_argument_that_is_no_tensor() -> None:
    fitted, plain = twins()
    for power in (2, 3, 2):
        assert_same(fitted, plain, torch.ones(4, 8), power)


def test_another_thread_count_is_another_plan() -> None:
    fitted, plain = twins()
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        assert_same(fitted, plain, torch.ones(4, 8))
        plan = ebbtide.plan_of(fitted)
        assert plan is not None
        assert plan.provenance["threads"] == str(threads)


def test_models_do_not_share_steps() -> None:
    one, two = Scaled(), Scaled()
    expected = [loss_and_gradient(copy.deepcopy(m), torch.ones(4, 8)) for m in (one, two)]
    ebbtide.fit(one, "1MiB")
    ebbtide.fit(two, "1MiB")
    for model, (loss, gradient) in zip((one, two), expected, strict=True):
        ours = loss_and_gradient(model, torch.ones(4, 8))
        assert ours[0] == loss
        assert torch.equal(ours[1], gradient)  # type: ignore[arg-type]


def test_a_fitted_model_is_freed_with_its_last_reference() -> None:
    model = ebbtide.fit(Scaled(), "1MiB")
    model(torch.ones(4, 8)).backward()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_calls_that_raise_as_in_eager_are_no_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_steps, "MOST_IN_A_ROW", 3)
    model = ebbtide.fit(nn.Sequential(nn.Linear(8, 8), nn.GELU()), "1GiB")
    for _ in range(5):
        with pytest.raises(RuntimeError, match=r"reduction dim|cannot be multiplied") as raised:
            model(torch.ones(4, 7))
        assert not isinstance(raised.value, CaptureError)
    model(torch.ones(4, 8)).sum().backward()
    assert ebbtide.calls_of(model).planned == 1
