"""A step over its budget is said, at whatever step it comes, and the next has room for it or is refused.

Every allocation of these loops is counted by a preloaded counter, which is none of ours.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.engine import judging
from ebbtide.engine.judging import _Sample
from ebbtide.errors import BudgetError, BudgetExceeded, UsageError
from ebbtide.measurement.process import highest_bytes
from ebbtide.measurement.step_record import StepRecord
from ebbtide.torch_seams.profiler import profiler_active

TESTS = Path(__file__).parents[1]
NOISE = 2**10
GROWN, STEPS = 6, 18
"""The first step that takes more, counted from 0, and how many there are; the eighth and the sixteenth are recorded."""
X = torch.randn(256, 64)

Step = Callable[[int], object]


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())))


def loss_grows(model: nn.Module) -> Step:
    """A loss outside that compares every output with more boxes."""
    return lambda i: (model(X)[:, None] - torch.ones(4 if i < GROWN else 48, 64)).abs().mean().backward()


def loss_of_two_grows(model: nn.Module) -> Step:
    """Likewise, of two forwards."""

    def step(i: int) -> None:
        one, other = model(X), model(X.flip(0))
        ((one - other)[:, None] - torch.ones(1 if i < GROWN else 48, 64)).abs().mean().backward()

    return step


def accumulated_loss_grows(model: nn.Module) -> Step:
    def step(i: int) -> None:
        for part in X.chunk(2):
            (model(part)[:, None] - torch.ones(4 if i < GROWN else 80, 64)).abs().mean().backward()

    return step


def keeps_more(model: nn.Module) -> Step:
    """Code between forward and backward that keeps what it makes until the step ends."""

    def step(i: int) -> None:
        out = model(X)
        kept = [out.detach() * 2 for _ in range(1 if i < GROWN else 40)]
        out.square().mean().backward()
        del kept

    return step


def another_backward(model: nn.Module) -> Step:
    """The discriminator's own step between the generator's forward and its backward."""
    other = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1))

    def step(_: int) -> None:
        out = model(X)
        other(out.detach()).mean().backward()
        other.zero_grad()
        out.square().mean().backward()

    return step


def hooks_grow(model: nn.Module) -> Step:
    """Hooks on parameters that take more later."""
    seen = [0]

    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        [parameter.grad + each for each in range(1 if seen[0] < GROWN else 80)]

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(hook)

    def step(i: int) -> None:
        seen[0] = i
        model(X).square().mean().backward()

    return step


def optimizer_in_hooks(model: nn.Module) -> Step:
    by_parameter = {each: torch.optim.AdamW([each], foreach=False) for each in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        by_parameter[parameter].step()
        by_parameter[parameter].zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(hook)
    return lambda _: model(X).square().mean().backward()


def retained_and_more(model: nn.Module) -> Step:
    """Code after a backward that retained its graph."""

    def step(_: int) -> int:
        loss = model(X).square().mean()
        loss.backward(retain_graph=True)
        return len([torch.cat([each.grad.flatten() for each in model.parameters()]) for _ in range(4)])

    return step


def retained_twice(model: nn.Module) -> Step:
    def step(_: int) -> int:
        loss = model(X).square().mean()
        loss.backward(retain_graph=True)
        made = [torch.cat([each.grad.flatten() for each in model.parameters()]) for _ in range(4)]
        loss.backward(retain_graph=True)
        return len(made)

    return step


@dataclass(frozen=True)
class Kind:
    """A loop, its budget, and the last step that may be over it: the first that is recorded after one that was."""

    make: Callable[[nn.Module], Step]
    budget: str
    last: int


KINDS = {
    "loss_grows": Kind(loss_grows, "1600KiB", 7),
    "loss_of_two_grows": Kind(loss_of_two_grows, "2MiB", 8),  # the first step is one that nobody expected
    "accumulated_loss_grows": Kind(accumulated_loss_grows, "1200KiB", 7),
    "keeps_more": Kind(keeps_more, "1200KiB", 7),
    "another_backward": Kind(another_backward, "80%", 0),
    "hooks_grow": Kind(hooks_grow, "900KiB", 7),
    "optimizer_in_hooks": Kind(optimizer_in_hooks, "620KiB", 1),
    "retained_and_more": Kind(retained_and_more, "90%", STEPS),  # no plan has room for it, which is said once
    "retained_twice": Kind(retained_twice, "90%", STEPS),
}


def trained(name: str) -> dict[str, Any]:
    """How the loop of that kind went: excesses, what was said after which step, and what the least budget did."""
    counter = ctypes.CDLL(None)
    counter.allocation_level.restype = counter.allocation_peak.restype = ctypes.c_long
    kind = KINDS[name]
    model = chain()
    resident = sum(each.nbytes for each in (*model.parameters(), X))
    step = kind.make(model)
    base = counter.allocation_level() - resident
    ebbtide.fit(model, kind.budget, options=ebbtide.Options(effort=30, progress=None))
    over: list[int] = []
    said: list[tuple[int, str]] = []
    refused: list[tuple[int, int]] = []
    for i in range(STEPS):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(3):
                counter.allocation_restart()
                try:
                    step(i)
                    break
                except BudgetError as error:
                    refused.append((i, error.smallest_bytes))
                    ebbtide.set_budget(model, error.smallest_bytes)
                    model.zero_grad()
            plan = ebbtide.plan_of(model)
            assert plan is not None
            if counter.allocation_peak() - base > plan.budget_bytes + NOISE:
                over.append(i)
            model.zero_grad()
        said += [(i, str(each.message)) for each in seen if "budget" in str(each.message)]
    return {"over": over, "said": said, "refused": refused}


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("no compiler for the counter of allocations")
    library = tmp_path_factory.mktemp("counter") / "counter.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", library, TESTS / "allocation_counter.c", "-ldl"]
    subprocess.run(command, check=True)
    code = (
        "import json, torch; torch.set_num_threads(1); from engine.test_judging import KINDS, trained; "
        "print(json.dumps({name: trained(name) for name in KINDS}))"
    )
    path = os.pathsep.join([str(TESTS), str(Path(ebbtide.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", KINDS)
def test_an_excess_is_said_at_the_next_recorded_step_and_then_there_is_none(name: str, loops: dict[str, Any]) -> None:
    loop = loops[name]
    assert all(i <= KINDS[name].last for i in loop["over"]), loop
    assert not loop["over"] or loop["said"] or loop["refused"], loop
    assert len(loop["refused"]) <= 2, f"the least budget that a refusal names is accepted: {loop}"


def test_the_sample() -> None:
    sample, recorded = _Sample(), []
    for step in range(1, 401):
        sample.steps = step
        if sample.due <= step:
            sample.begins()
            sample.ended()
            recorded.append(step)
    assert recorded == [1, 2, 4, 8, 16, 32, 64, 100, 200, 300, 400]


def test_a_forward_without_a_backward_does_not_take_the_sample_away() -> None:
    sample = _Sample(steps=8, due=8)
    for _ in range(2):
        sample.begins()
        assert sample.due == 8, "the next step is recorded instead"
    sample.begins()
    assert sample.due == 16


def fitted(budget: str = "1600KiB", **options: Any) -> nn.Module:
    return ebbtide.fit(chain(), budget, options=ebbtide.Options(effort=30, progress=None, **options))


def test_a_violation_raises_at_the_end_of_its_step_where_that_is_asked_for() -> None:
    model = fitted(on_violation="raise")
    step = loss_grows(model)
    for i in range(7):
        step(i)
        model.zero_grad()
    with pytest.raises(BudgetExceeded, match=r"outside the model took .* between") as raised:
        step(7)
    assert raised.value.measured_peak_bytes > raised.value.budget_bytes
    assert all(each.grad is not None for each in model.parameters()), "its gradients are there"
    model.zero_grad()
    with pytest.raises(BudgetError):  # whoever handles it and goes on meets what was learned
        step(0)


def test_a_violation_is_replanned_or_raised_and_planning_has_none() -> None:
    with pytest.raises(UsageError, match="on_violation"):
        ebbtide.Options(on_violation="stop")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="runs no step"):
        ebbtide.plan(chain(), (X,), budget="100%", options=ebbtide.Options(on_violation="raise"))


@pytest.mark.parametrize("of", ["torch", "ours"])
def test_a_record_gives_way_to_a_profiler_of_the_users(of: str) -> None:
    model = fitted("100%")
    for _ in range(4):  # the fourth would be recorded to its end
        loss = model(X).square().mean()
        with torch.profiler.profile(profile_memory=True, acc_events=True) if of == "torch" else ebbtide.measure():
            loss.backward()
    assert not profiler_active()


def test_what_a_profiler_has_put_off_is_made_up_for() -> None:
    model = fitted()
    step = loss_grows(model)
    for i in range(7):
        step(i)
        model.zero_grad()
    with torch.profiler.profile(acc_events=True):
        step(7)
        model.zero_grad()
    with pytest.warns(UserWarning, match="code outside the model took"):
        step(8)


def test_steady_steps_are_recorded_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    model, begun = fitted("100%"), []
    begin = StepRecord.begin
    monkeypatch.setattr(StepRecord, "begin", lambda self: begun.append(self) or begin(self))
    for _ in range(260):
        model(X).square().mean().backward()
        model.zero_grad()
    assert len(begun) <= 11


def test_what_a_step_lets_go_of_earlier_ones_is_no_excess() -> None:
    """Gradients that are cleared between forward and backward make room there."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters())
    ebbtide.fit(model, "100%", optimizer=optimizer, options=ebbtide.Options(effort=30, progress=None))
    for _ in range(10):  # warnings are errors
        loss = model(X).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_process_that_rises_has_its_next_step_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the next of the sample. Earlier tests may have taken the process higher than this one does."""
    taken = [highest_bytes()]
    monkeypatch.setattr(judging, "highest_bytes", lambda: taken[0])
    model = chain()
    fitted = ebbtide.fit(model, "8MiB", progress=None)
    boxes = torch.ones(4, 64)

    def step(count: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (fitted(X)[:, None] - boxes.repeat(count, 1)).abs().mean().backward()
        return [str(each.message) for each in caught]

    for _ in range(34):
        step(1)
    assert not step(1)
    step(256)  # in the 36th step; the 64th would be recorded
    taken[0] += 2**26
    assert any("over its budget" in each for each in step(256))
    with pytest.raises(BudgetError):
        step(256)


# -- records that end --------------------------------------------------------------------------------------------------


def test_a_backward_that_never_comes_refuses_nobody() -> None:
    """The loss of a step that is being recorded is kept: other models are planned, and then measured, all the same."""
    first = ebbtide.fit(chain(), "200%", options=ebbtide.Options(effort=10))
    kept = first(X).square().mean()
    assert profiler_active()
    other = ebbtide.fit(nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64)), "200%")
    other(X[:73]).square().mean().backward()  # ops of a shape that nobody has timed
    del kept
    kept = first(X).square().mean()
    assert profiler_active()
    for _ in range(5):
        other(X[:73]).square().mean().backward()
    step = ebbtide.step_of(other)
    assert step is not None
    assert step.measured_above_bytes is not None
    kept.backward()
    assert not profiler_active()


@pytest.mark.parametrize("ends", ["unfit", "dropped", "given up"])
def test_a_record_ends_with_its_step(ends: str) -> None:
    model = ebbtide.fit(chain(), "200%", options=ebbtide.Options(effort=10))
    loss: torch.Tensor | None = model(X).square().mean()
    assert profiler_active()
    match ends:
        case "unfit":
            ebbtide.unfit(model)
        case "dropped":
            loss = None
        case _:
            with ebbtide.measure(model):
                pass
    assert not profiler_active()
    del loss
