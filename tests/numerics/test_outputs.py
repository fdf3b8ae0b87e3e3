"""Which outputs take gradients, and a loss outside the model: same bits as eager, budget held, or refused by name."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebbtide
from ebbtide.errors import BudgetError, CaptureError, UsageError

Loss = Callable[[Any], torch.Tensor]
CLASSES = 512


class Classifier(nn.Module):
    """Logits that are larger than all else; what is returned is chosen."""

    def __init__(self, returned: str) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
        self.head = nn.Linear(64, CLASSES)
        self.returned = returned

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        logits = self.head(self.body(x))
        match self.returned:
            case "logits":
                return logits
            case "pair":
                return F.cross_entropy(logits, target), logits
            case "dict":
                return {"loss": F.cross_entropy(logits, target), "extra": [logits, {"rows": logits.sum(1)}]}
            case _:
                return F.cross_entropy(logits, target)


X = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(CLASSES, (256,), generator=torch.Generator().manual_seed(2))


@functools.cache
def peak_of(returned: str, **options: Any) -> ebbtide.Plan:
    return ebbtide.plan(Classifier(returned), (X, TARGET), budget="1000%", options=ebbtide.Options(**options))


def trained(model: nn.Module, loss_of: Loss, steps: int = 3) -> list[torch.Tensor]:
    """Parameters after a few optimizer steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model(X, TARGET)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def assert_trains_as_eager(returned: str, budget: int, loss_of: Loss, **options: Any) -> nn.Module:
    model = Classifier(returned)
    expected = trained(copy.deepcopy(model), loss_of)
    found = trained(ebbtide.fit(model, budget, options=ebbtide.Options(**options)), loss_of)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return model


def first(outputs: Any) -> torch.Tensor:
    return outputs["loss"] if isinstance(outputs, dict) else outputs[0]


@pytest.mark.parametrize("returned", ["pair", "dict"])
def test_outputs_beside_a_loss_cost_no_gradient(returned: str) -> None:
    alone, beside = peak_of("loss"), peak_of(returned)
    counted = peak_of(returned, gradients="all")
    logits = X.shape[0] * CLASSES * 4
    assert beside.baseline.above_bytes <= alone.baseline.above_bytes + logits + 4096  # and the sums of rows
    assert sum(beside.program.buffers[b].bytes for b in beside.program.tangents) == 4
    assert sum(counted.program.buffers[b].bytes for b in counted.program.tangents) >= logits
    assert_trains_as_eager(returned, beside.smallest_bytes + 40_000, first)


def test_outputs_beside_a_loss_look_as_in_eager() -> None:
    model = ebbtide.fit(Classifier("dict"), "1GiB")
    outputs = model(X, TARGET)
    eager = Classifier("dict")
    eager.load_state_dict(model.state_dict())
    expected = eager(X, TARGET)
    assert outputs.keys() == expected.keys()
    for ours, theirs in zip(outputs["extra"], expected["extra"], strict=True):
        ours, theirs = (t["rows"] if isinstance(t, dict) else t for t in (ours, theirs))
        assert ours.requires_grad
        assert torch.equal(ours, theirs)


def test_a_gradient_for_an_output_beside_the_loss_raises_and_names_the_remedy() -> None:
    model = ebbtide.fit(Classifier("pair"), "1GiB")
    loss, logits = model(X, TARGET)
    with pytest.raises(CaptureError, match=r'(?s)gradients="all".*\(256, 512\)'):
        (loss + logits.square().mean()).backward()
    assert all(p.grad is None for p in model.parameters())


def test_with_gradients_for_all_every_output_can_be_used() -> None:
    budget = peak_of("pair", gradients="all").baseline_peak_bytes * 2
    model = assert_trains_as_eager("pair", budget, lambda o: o[0] + o[1].square().mean(), gradients="all")
    plan = ebbtide.plan_of(model)
    assert plan is not None


def test_gradients_takes_two_values() -> None:
    with pytest.raises(UsageError, match="'some'"):
        ebbtide.fit(Classifier("pair"), "1GiB", options=ebbtide.Options(gradients="some"))  # type: ignore[arg-type]


def outside(outputs: Any) -> torch.Tensor:
    return F.cross_entropy(outputs, TARGET)


def test_a_loss_outside_is_measured_in_the_first_step_and_planned_for_from_the_second() -> None:
    logits = X.shape[0] * CLASSES * 4
    budget = peak_of("logits").resident_bytes + 5 * logits
    model = assert_trains_as_eager("logits", budget, outside)
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert 2 * logits <= plan.program.between_bytes <= 3 * logits + 64
    model.zero_grad()
    with ebbtide.measure(model, X, TARGET) as gauge:
        outside(model(X, TARGET)).backward()
    assert plan.predicted_peak_bytes <= budget
    # The caller drops the logits, which the plan has to count as held.
    assert plan.timeline.above_bytes - logits <= gauge.above_bytes <= plan.timeline.above_bytes
    assert gauge.peak_bytes <= budget


def test_a_budget_too_small_says_that_the_loss_outside_comes_on_top() -> None:
    model = ebbtide.fit(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), 1000)
    with pytest.raises(BudgetError) as caught:
        model(torch.randn(16, 64))
    assert "plus what the loss outside takes, which the first step measures" in str(caught.value)


def test_a_loss_outside_that_does_not_fit_is_told_before_the_second_step() -> None:
    logits = X.shape[0] * CLASSES * 4
    alone = peak_of("logits")
    model = ebbtide.fit(Classifier("logits"), alone.smallest_bytes + logits // 2)
    with pytest.warns(UserWarning, match="code outside the model took"):
        outside(model(X, TARGET)).backward()
    model.zero_grad()
    with pytest.raises(ebbtide.errors.BudgetError) as caught:
        model(X, TARGET)
    assert caught.value.smallest_bytes > caught.value.budget_bytes


def test_a_profiler_postpones_the_measurement_of_a_loss_outside() -> None:
    model = ebbtide.fit(Classifier("logits"), "1GiB")
    outside(model(X, TARGET)).backward()  # capture needs to measure costs, which no profiler may disturb
    model = ebbtide.fit(Classifier("logits"), "1GiB")
    with torch.profiler.profile(acc_events=True):
        outside(model(X, TARGET)).backward()
    plan = ebbtide.plan_of(model)
    assert plan is not None
    outside(model(X, TARGET)).backward()
    outside(model(X, TARGET)).backward()
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.program.between_bytes > 0


@pytest.mark.parametrize("how", ["backward", "autograd.backward", "autograd.grad"])
def test_every_way_to_start_a_backward_ends_the_measurement(how: str) -> None:
    model = ebbtide.fit(Classifier("logits"), "1GiB")
    backward, grad = torch.autograd.backward, torch.autograd.grad
    for _ in range(2):
        loss = outside(model(X, TARGET))
        if how == "backward":
            loss.backward()
        elif how == "autograd.backward":
            torch.autograd.backward(loss)
        else:
            torch.autograd.grad(loss, list(model.parameters()))
        assert (torch.autograd.backward, torch.autograd.grad) == (backward, grad)
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.program.between_bytes > 0


def test_a_loss_outside_that_never_comes_leaves_nothing_behind() -> None:
    model = ebbtide.fit(Classifier("logits"), "1GiB")
    backward = torch.autograd.backward
    model(X, TARGET)
    for _ in range(2):
        outside(model(X, TARGET)).backward()
    assert torch.autograd.backward is backward
    with torch.profiler.profile(profile_memory=True, acc_events=True):  # nobody's recording is left running
        torch.zeros(3)


@pytest.mark.long
def test_a_process_may_end_while_a_loss_outside_is_awaited() -> None:
    """Two do, one of them by an exception; they share what they import."""
    lines = [
        "import os, torch, torch._dynamo, ebbtide",
        "other = os.fork()",
        "model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))",
        "output = ebbtide.fit(model, '150%', options=ebbtide.Options(effort=100))(torch.randn(16, 64))",
        "if other:",
        "    print(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]), flush=True)",
        "    raise ValueError('in the loss')",
    ]
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert ended.stdout == "0\n", ended.stderr
    assert ended.returncode == 1, ended.stderr
    assert "ValueError: in the loss" in ended.stderr


def test_plan_with_a_loss_counts_it_as_part_of_the_step() -> None:
    inside, told = peak_of("loss"), peak_of("logits", loss=outside)
    assert told.baseline.above_bytes == inside.baseline.above_bytes
    assert "outside" in peak_of("logits").provenance["loss"]


def test_verify_starts_from_all_outputs_where_there_is_no_loss() -> None:
    model = Classifier("logits")
    plan = ebbtide.plan(model, (X, TARGET), budget=peak_of("logits").smallest_bytes)
    seen = ebbtide.verify(model, (X, TARGET), None, plan)
    assert seen.differences == seen.eager_differences == ()
    assert abs(seen.prediction_error) < 1e-3
    assert seen.within_budget


@pytest.mark.parametrize("returned", ["view", "view and result", "view of a view"])
def test_a_view_of_a_result_may_be_returned(returned: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            h = self.linear(x).tanh()
            return {"view": h.t(), "view and result": (h.t(), h), "view of a view": h.t()[1:].reshape(7, 2, -1)}[
                returned
            ]

    plain = Model()
    model = ebbtide.fit(copy.deepcopy(plain), "1MiB", options=ebbtide.Options(effort=100))
    for _ in range(3):
        x = torch.randn(4, 8)
        for each in (model, plain):
            output = each(x)
            (output[0].sum() if isinstance(output, tuple) else output.square().sum()).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    kept = model(x)
    with pytest.warns(UserWarning, match="another forward of this model is in flight"):
        model(x.flip(0)[:2])
    del kept


class HandsThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        made = self.layer(x) * self.scale
        return {"loss": made.square().mean(), "w": self.layer.weight, "x": x, "scale": self.scale, "made": made}


@pytest.mark.parametrize("gradients", ["loss", "all"])
@pytest.mark.parametrize("takes", [False, True])
def test_what_is_handed_through_is_what_it_was(gradients: Any, takes: bool) -> None:
    model = HandsThrough()
    plain = copy.deepcopy(model)
    ebbtide.fit(model, "1GiB", options=ebbtide.Options(gradients=gradients))
    for _ in range(2):
        rows = torch.randn(3, 4, requires_grad=takes)
        other = rows.detach().clone().requires_grad_(takes)
        mine, theirs = model(rows), plain(other)
        assert mine["w"] is model.layer.weight
        assert mine["x"] is rows
        assert mine["scale"] is model.scale
        for outputs in (mine, theirs):
            (outputs["loss"] + outputs["w"].square().sum()).backward()
        assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)  # type: ignore[arg-type]
        assert not takes or torch.equal(rows.grad, other.grad)  # type: ignore[arg-type]


def test_the_first_step_leaves_a_loss_outside_all_the_room_that_there_is() -> None:
    """Nobody knows yet what it takes; the next step goes by what was measured, and other shapes by what is likely."""
    torch.manual_seed(0)
    model = ebbtide.fit(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 64)), "1GiB", progress=None)
    seen: list[int] = []
    for rows in (64, 64, 192, 192):
        model.zero_grad()
        out = model(torch.randn(rows, 16))
        (torch.log_softmax(out, 1).exp() * torch.log_softmax(out * 2, 1)).mean().backward()
        plan = ebbtide.plan_of(model)
        assert plan is not None
        seen.append(plan.program.between_bytes)
        assert bool(seen[-1]) or plan.planner == "least_memory"
    first, known, likely, later = seen
    assert first == 0
    assert 64 * 64 * 4 < known < 3 * known <= likely == later
