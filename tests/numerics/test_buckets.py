"""A model called at many lengths: bits as eager's, every step within the budget, one search for many shapes."""

from __future__ import annotations

import copy
import functools
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebbtide
from ebbtide._api.fit import step_of
from ebbtide.engine import captured_steps, plans
from ebbtide.errors import BudgetError
from ebbtide.planning import one_program as planning
from ebbtide.zoo import GPTConfig, gpt

LONGEST = 48
CONFIG = GPTConfig(vocabulary=64, length=LONGEST, layers=1, width=32, heads=2, dropout=0.1)
LENGTHS = (8, 17, 31, 36, 44, 48)
EFFORT = 1_000


class Chain(nn.Module):
    """A language model without attention: a fraction of the ops, for what does not depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Text:
    """Eight sequences of tokens, cut to any length; a step on them."""

    def __init__(self, chain: bool = False) -> None:
        case = gpt(8, CONFIG)
        self.model = Chain() if chain else case.model
        self.tokens, self.targets = case.args

    def arguments(self, length: int, batch: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[:batch, :length].contiguous(), self.targets[:batch, :length].contiguous()

    def gradients(self, model: torch.nn.Module, length: int, batch: int = 8) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(length)
        loss = model(*self.arguments(length, batch))
        loss.backward()
        found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
        return found

    def unplanned(self, length: int) -> ebbtide.Plan:
        return unplanned(isinstance(self.model, Chain), length)


@functools.cache
def unplanned(chain: bool, length: int) -> ebbtide.Plan:
    text = Text(chain)
    return ebbtide.plan(text.model, text.arguments(length), budget="1000%", options=ebbtide.Options(planner="keep_all"))


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> Text:
    monkeypatch.setattr("ebbtide.engine.shared_calls.OWN_CAPTURES", 2)
    return Text()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Text:
    monkeypatch.setattr("ebbtide.engine.shared_calls.OWN_CAPTURES", 2)
    return Text(chain=True)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry per plan that was searched for, of however many programs for the same step."""
    made: list[str] = []
    named, make_plan = planning.planner_named, plans.make_plan

    def counting(name: str) -> Callable[[Any], Any]:
        def run(problem: Any) -> Any:
            made.append(name)
            return named(name)(problem)

        return run

    def one_plan(*args: Any, **kwargs: Any) -> ebbtide.Plan:
        before = len(made)
        try:
            return make_plan(*args, **kwargs)
        finally:
            del made[before + 1 :]

    monkeypatch.setattr(planning, "planner_named", counting)
    monkeypatch.setattr(plans, "make_plan", one_plan)
    return made


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) > 1 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def budget_for(text: Text, share: float) -> int:
    """What the longest step takes, less a share of what it takes above its start."""
    plan = text.unplanned(LONGEST)
    return plan.baseline_peak_bytes - round(share * plan.baseline.above_bytes)


@pytest.mark.parametrize(
    ("kind", "budget", "lengths"),
    [pytest.param("text", "bytes", LENGTHS, marks=pytest.mark.long), ("short", "80%", LENGTHS[1:])],
)
def test_many_lengths_in_any_order_have_eagers_bits_within_the_budget(
    kind: str, budget: str, lengths: tuple[int, ...], searched: list[str], request: pytest.FixtureRequest
) -> None:
    text: Text = request.getfixturevalue(kind)
    plain, model = text.model, copy.deepcopy(text.model)
    limit = budget_for(text, 0.4) if budget == "bytes" else budget
    searched.clear()
    ebbtide.fit(model, limit, options=ebbtide.Options(effort=EFFORT))
    order = [length for length in lengths for _ in range(3)]
    random.Random(3).shuffle(order)
    recomputed = 0
    for length in order:
        assert equal(text.gradients(model, length), text.gradients(plain, length)), length
        step, plan = step_of(model), ebbtide.plan_of(model)
        assert step is not None
        assert plan is not None
        recomputed += len(plan.schedule.computes) > len(plan.program.ops) + 1
        assert step.forward_calls > 1 or step.verified_buffers > 0 or plan.overhead == 0, "not proven"
    assert recomputed > len(lengths), "the budget tests nothing"
    assert len(searched) <= 3, searched
    for length in lengths:
        arguments = text.arguments(length)
        with ebbtide.measure(model, arguments) as peak:
            model(*arguments).backward()
        model.zero_grad()
        plan = ebbtide.plan_of(model)
        assert plan is not None
        assert peak.peak_bytes <= plan.budget_bytes
        assert peak.above_bytes <= plan.timeline.above_bytes + 64  # autograd's own scalar
        assert isinstance(limit, str) or plan.budget_bytes == limit


def test_a_larger_shape_is_planned_before_it_runs(short: Text) -> None:
    limit = budget_for(short, 0.5)
    model = ebbtide.fit(short.model, limit, options=ebbtide.Options(effort=EFFORT))
    for length in (24, 36):
        short.gradients(model, length)
    arguments = short.arguments(LONGEST)
    torch.manual_seed(1)
    model(*arguments).backward()  # its ops are measured here, which a running measurement does not allow
    plan, step = ebbtide.plan_of(model), step_of(model)
    assert plan is not None
    assert step is not None
    assert step.verified_buffers > 0
    assert plan.baseline_peak_bytes > limit, "unplanned it would not fit"
    assert plan.predicted_peak_bytes <= limit
    model.zero_grad()
    with ebbtide.measure(model, arguments) as peak:
        model(*arguments).backward()
    assert peak.peak_bytes <= limit


def test_a_shape_that_no_bucket_serves_is_searched_for(
    short: Text, searched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, limit = copy.deepcopy(short.model), budget_for(short, 0.5)
    model = ebbtide.fit(short.model, limit, options=ebbtide.Options(effort=EFFORT))
    short.gradients(model, 40)
    monkeypatch.setattr("ebbtide.planning.shape_plans.WASTE", -1.0)  # nothing is good enough
    searched.clear()
    assert equal(short.gradients(model, LONGEST), short.gradients(plain, LONGEST))
    assert searched == ["auto"]


@pytest.mark.long
def test_a_shape_that_cannot_fit_is_refused_and_the_others_go_on(text: Text) -> None:
    plain = copy.deepcopy(text.model)
    least = text.unplanned(24).smallest_bytes
    model = ebbtide.fit(text.model, least + 20_000, options=ebbtide.Options(effort=EFFORT))
    for length in (24,):
        assert equal(text.gradients(model, length), text.gradients(plain, length))
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    with pytest.raises(BudgetError) as caught:
        model(*text.arguments(LONGEST))
    error = caught.value
    assert error.budget_bytes < error.floor_bytes <= error.smallest_bytes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    for length in (24, 12):
        assert equal(text.gradients(model, length), text.gradients(plain, length))


def test_the_last_batch_of_an_epoch_takes_the_plan_of_the_others(short: Text, searched: list[str]) -> None:
    plain, limit = copy.deepcopy(short.model), budget_for(short, 0.6)
    model = ebbtide.fit(short.model, limit, options=ebbtide.Options(effort=EFFORT))
    searched.clear()
    for batch in (8, 8, 5, 8, 5):
        assert equal(short.gradients(model, LONGEST, batch), short.gradients(plain, LONGEST, batch))
    assert searched == ["auto"]


@pytest.mark.long
def test_of_many_shapes_the_one_used_longest_ago_is_forgotten(short: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = copy.deepcopy(short.model)
    monkeypatch.setattr(captured_steps, "MOST_STEPS", 2)
    model = ebbtide.fit(short.model, budget_for(short, 0.3), options=ebbtide.Options(effort=EFFORT))
    steps: list[weakref.ref[object]] = []
    for length in (16, 20):
        short.gradients(model, length)
        steps.append(weakref.ref(step_of(model)))  # type: ignore[arg-type]
    short.gradients(model, 16)
    with pytest.warns(UserWarning, match="more than 2 kinds of arguments"):
        short.gradients(model, 24)
    gc.collect()
    assert steps[0]() is not None
    assert steps[1]() is None, "what was captured for it is kept somewhere"
    for length in (20, 16, 24, 20):
        assert equal(short.gradients(model, length), short.gradients(plain, length))
