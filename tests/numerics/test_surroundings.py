"""What surrounds a step: other forwards, other backwards, other modes, exceptions; a test each."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import CaptureError

Pair = tuple[torch.nn.Module, torch.nn.Module]


@pytest.fixture
def pair(study: Any) -> Iterator[Pair]:
    """The same model twice, fitted tightly and plain; every step of the fitted one recomputes and replays."""
    subject = study("mlp_chain with dropout")
    fitted, plain = copy.deepcopy(subject.case.model), copy.deepcopy(subject.case.model)
    gradients = sum(p.nbytes for p in fitted.parameters())
    yield ebbtide.fit(fitted, subject.at(0.2).budget_bytes + gradients + 12_000), plain
    plan = ebbtide.plan_of(fitted)
    assert plan is None or len(plan.schedule.computes) > len(plan.program.ops) + 1


def rows(seed: int) -> torch.Tensor:
    return torch.randn(128, 32, generator=torch.Generator().manual_seed(seed))


def assert_same_gradients(pair: Pair) -> None:
    for p, q in zip(*(m.parameters() for m in pair), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["first in first out", "last in first out"])
@pytest.mark.filterwarnings("ignore:another forward of this model is in flight")
def test_two_forwards_before_the_first_backward(pair: Pair, order: str) -> None:
    for model in pair:
        torch.manual_seed(1)
        losses = [model(rows(1)), model(rows(2))]
        for loss in losses if order == "first in first out" else reversed(losses):
            loss.backward()
    assert_same_gradients(pair)


@pytest.mark.filterwarnings("ignore:another forward of this model is in flight")
def test_overlapping_steps_are_not_taken_for_each_other(pair: Pair) -> None:
    for model in pair:
        torch.manual_seed(1)
        first, second = model(rows(1)), model(rows(2))
        second.backward()
        del second
        third = model(rows(3))
        first.backward()
        third.backward()
    assert_same_gradients(pair)


@pytest.mark.filterwarnings("ignore:another forward of this model is in flight")
def test_one_backward_of_two_forwards(pair: Pair) -> None:
    for model in pair:
        torch.manual_seed(1)
        (model(rows(1)) + 2 * model(rows(2))).backward()
    assert_same_gradients(pair)


def test_a_second_forward_in_flight_is_warned_about_once(pair: Pair) -> None:
    model = pair[0]
    first = model(rows(1))
    with pytest.warns(UserWarning, match="in flight"):
        second = model(rows(2))
    third = model(rows(3))
    (first + second + third).backward()


@pytest.mark.filterwarnings("ignore:this backward retains its graph")
def test_retain_graph_twice(pair: Pair) -> None:
    for model in pair:
        torch.manual_seed(1)
        loss = model(rows(1))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(pair)


def test_user_reseeds_between_forward_and_backward(pair: Pair) -> None:
    states: list[torch.Tensor] = []
    for model in pair:
        torch.manual_seed(1)
        loss = model(rows(1))
        torch.manual_seed(99)
        loss.backward()
        states.append(torch.get_rng_state())
    assert_same_gradients(pair)
    assert torch.equal(*states)


def test_anomaly_detection(pair: Pair) -> None:
    for model in pair:
        torch.manual_seed(1)
        with torch.autograd.set_detect_anomaly(True):
            model(rows(1)).backward()
    assert_same_gradients(pair)


def test_autograd_grad(pair: Pair) -> None:
    found: list[tuple[torch.Tensor, ...]] = []
    for model in pair:
        torch.manual_seed(1)
        found.append(torch.autograd.grad(model(rows(1)), list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradient_of_the_input(pair: Pair) -> None:
    inputs = [rows(1).requires_grad_(), rows(1).requires_grad_()]
    for model, x in zip(pair, inputs, strict=True):
        torch.manual_seed(1)
        model(x).backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:this backward retains its graph")
def test_double_backward_is_refused(pair: Pair) -> None:
    loss = pair[0](rows(1))
    first, *_ = torch.autograd.grad(loss, list(pair[0].parameters()), create_graph=True)
    with pytest.raises(CaptureError, match="second derivative"):
        first.sum().backward()


def test_calls_without_gradients_run_as_before_and_leave_the_plan(pair: Pair) -> None:
    pair[0](rows(1)).backward()
    plan, step = ebbtide.plan_of(pair[0]), ebbtide.step_of(pair[0])
    assert step is not None
    calls = step.forward_calls
    for switch in (torch.no_grad, torch.inference_mode):
        with switch():
            torch.manual_seed(1)
            ours = pair[0](rows(2))
            torch.manual_seed(1)
            assert torch.equal(ours, pair[1](rows(2)))
    assert ebbtide.plan_of(pair[0]) is plan
    assert step.forward_calls == calls


def test_evaluation_mode_with_gradients_has_a_plan_of_its_own(pair: Pair) -> None:
    for model in pair:
        model.eval()
        model(rows(1)).backward()
    assert_same_gradients(pair)
    plan = ebbtide.plan_of(pair[0])
    assert plan is not None
    assert not any(op.random for op in plan.program.ops)
    for model in pair:
        model.train()
        torch.manual_seed(1)
        model(rows(1)).backward()
    assert_same_gradients(pair)


def test_forward_whose_loss_is_dropped(pair: Pair) -> None:
    for model in pair:
        torch.manual_seed(1)
        model(rows(1))
        model(rows(2)).backward()
    assert_same_gradients(pair)
    step = ebbtide.step_of(pair[0])
    assert step is not None
    assert step.verified_buffers > 0


def test_exception_between_forward_and_backward(pair: Pair) -> None:
    for model in pair:
        torch.manual_seed(1)
        with pytest.raises(KeyboardInterrupt):
            _interrupted(model)
        model(rows(2)).backward()
    assert_same_gradients(pair)


def _interrupted(model: torch.nn.Module) -> None:
    _loss = model(rows(1))
    raise KeyboardInterrupt


def test_exception_in_a_gradient_hook(pair: Pair) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("of the user")

    for model in pair:
        handle = model.layers[0].weight.register_hook(fail)  # type: ignore[union-attr, index]
        with pytest.raises(ArithmeticError, match="of the user"):
            model(rows(1)).backward()
        handle.remove()
        model.zero_grad()
        torch.manual_seed(1)
        model(rows(2)).backward()
    assert_same_gradients(pair)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it, in any compiled function
def test_hooks_run_as_in_eager(study: Any) -> None:
    subject = study("mlp_chain")
    pair = (copy.deepcopy(subject.case.model), copy.deepcopy(subject.case.model))
    log: list[str] = []
    for model in pair:
        model.register_forward_pre_hook(lambda _, args: log.append("before") or (args[0] + 1,))
        model.register_forward_hook(lambda _, args, out: log.append("after"))
        model.register_full_backward_hook(lambda _, into, out: log.append("backward"))
        model.layers[0].register_forward_hook(lambda _, args, out: out * 2)
        model.layers[1].register_forward_pre_hook(lambda _, args: (args[0] - 1,))
        model.layers[2].weight.register_hook(lambda gradient: gradient * 3)
    ebbtide.fit(pair[0], "1MiB")
    for model in pair:
        model(rows(1).requires_grad_()).backward()
    assert log == ["before", "after", "backward"] * 2
    assert_same_gradients(pair)


def test_profiler_at_later_calls_postpones_the_measurement(pair: Pair) -> None:
    model = pair[0]
    model(rows(1)).backward()
    model.zero_grad()
    with torch.profiler.profile(profile_memory=True, acc_events=True):
        model(rows(1)).backward()
    step = ebbtide.step_of(model)
    assert step is not None
    assert step.measured_above_bytes is None
    model.zero_grad()
    model(rows(1)).backward()
    assert step.measured_above_bytes is not None


def test_autocast_around_the_call_is_a_key_of_its_own(study: Any) -> None:
    # Without dropout: eager rounds its noise to bfloat16, the op that a capture takes for it does not.
    subject = study("mlp_chain")
    fitted, plain = copy.deepcopy(subject.case.model), copy.deepcopy(subject.case.model)
    ebbtide.fit(fitted, subject.at(0.4).budget_bytes + sum(p.nbytes for p in fitted.parameters()))
    fitted(rows(1)).backward()
    full = ebbtide.plan_of(fitted)
    fitted.zero_grad()
    for model in (fitted, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(rows(2))
        loss.backward()
    assert_same_gradients((fitted, plain))
    halved = ebbtide.plan_of(fitted)
    assert full is not None
    assert halved is not None
    assert halved.program.fingerprint != full.program.fingerprint
    assert any("bfloat16" in view for op in halved.program.ops for view in op.views)


def test_a_gradient_scaler_scales_and_skips_as_in_eager(pair: Pair) -> None:
    scales: list[list[float]] = []
    for model in pair:
        torch.manual_seed(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        seen: list[float] = []
        for step in range(4):
            optimizer.zero_grad()
            x = rows(step) if step != 2 else rows(step).fill_(float("inf"))  # its gradients overflow: skipped
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
        scales.append(seen)
    assert scales[0] == scales[1]
    assert min(scales[0]) < max(scales[0]), "no step was skipped"
    for p, q in zip(*(m.parameters() for m in pair), strict=True):
        assert torch.equal(p, q)


def test_hooks_that_change_saved_values_are_blamed_by_name() -> None:
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU()))).double()
    ebbtide.fit(model, "60%", options=ebbtide.Options(effort=100))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t if t.dtype != torch.float64 or isinstance(t, nn.Parameter) else t.float(),
        lambda t: t if t.dtype != torch.float32 else t.double(),
    ):
        loss = model(torch.randn(256, 64, dtype=torch.float64)).square().mean()
    with pytest.raises(ebbtide.errors.VerificationError, match="saved-tensor hooks"):
        loss.backward()


class _Kept(torch.autograd.Function):
    made: list[weakref.ref[torch.Tensor]]

    @staticmethod
    def forward(ctx: object, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one + other

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = gradients[0] + 1, gradients[0] + 2
        _Kept.made = [weakref.ref(each) for each in made]
        return made


def test_a_backward_that_failed_leaves_nothing_in_the_next_step(pair: Pair) -> None:
    """Torch keeps the gradients that were on their way until the next backward: those are in no plan."""
    leaves = [torch.ones(1000, requires_grad=True) for _ in range(2)]
    for each in leaves:
        each.register_hook(lambda _: 1 / 0)
    pair[0](rows(1)).backward()
    with pytest.raises(ZeroDivisionError):
        _Kept.apply(*leaves).sum().backward()  # type: ignore[attr-defined]
    assert any(each() is not None for each in _Kept.made), "torch releases them by itself"
    loss = pair[0](rows(1))
    assert all(each() is None for each in _Kept.made)
    loss.backward()
