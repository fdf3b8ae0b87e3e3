"""All exact rewrites by default: where the budget asks for them, and nobody looks at them where it does not."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebbtide
from ebbtide._api.estimate import capture_program
from ebbtide.errors import BudgetError
from ebbtide.planning.alternatives import Alternative, Alternatives, Costed, Hints, best_of
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.rewrites.rules import RULES
from ebbtide.step.program import Program
from ebbtide.step.rewrite import Rewrite, Rewritten
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.units import Budget


class Wide(nn.Module):
    """Hidden values pin it; its head is small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(F.gelu(self.up(x)))).square().mean()


class Attends(nn.Module):
    """Scores pin it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.inner(x).chunk(3, -1))
        return (F.softmax(q @ k.mT / math.sqrt(8), dim=-1) @ v).square().mean()


class Normalised(Attends):
    """The same, in a form whose scores are read by a sum: only what dies can be written over."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.inner(x).chunk(3, -1))
        weights = F.softmax(q @ k.mT / math.sqrt(8), dim=-1)
        return (weights / weights.sum(-1, keepdim=True) @ v).square().mean()


class Deep(nn.Sequential):
    """Layers one after the other, of which much can be made again."""

    def __init__(self) -> None:
        super().__init__(*(layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {"feed-forward": Wide, "attention": Attends, "in-place": Normalised}
SHARE = {"feed-forward": 0.6, "attention": 0.4, "in-place": 0.98}


def data(seed: int = 1) -> torch.Tensor:
    return torch.randn(2, 192, 32, generator=torch.Generator().manual_seed(seed))


def smallest(model: nn.Module, **settings: str) -> int:
    with pytest.raises(BudgetError) as refused:
        ebbtide.plan(model, (data(),), budget=1, options=ebbtide.Options(progress=None, **settings))  # type: ignore[arg-type]
    assert refused.value.smallest_bytes is not None
    return refused.value.smallest_bytes


def history(model: nn.Module) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        loss = model(data(i))
        loss.backward()
        found += [loss.detach().clone(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
        sgd.step()
        sgd.zero_grad()
    return found


@pytest.mark.parametrize("rule", MODELS)
def test_below_what_the_captured_step_needs_it_is_rewritten_unasked(rule: str) -> None:
    model = MODELS[rule]()
    expected = history(copy.deepcopy(model))
    budget = int(SHARE[rule] * smallest(MODELS[rule](), rewrites="none"))
    ebbtide.plan(
        MODELS[rule](), (data(),), budget=budget, options=ebbtide.Options(progress=None)
    )  # finds out where there is room
    ebbtide.fit(model, budget, progress=None)
    assert all(map(torch.equal, history(model), expected))
    plan, step = ebbtide.plan_of(model), ebbtide.step_of(model)
    assert plan is not None
    assert plan.rewritten is not None
    assert rule in {each.rule for each in plan.rewritten.rewrites}
    assert step is not None
    assert step.measured_above_bytes is not None
    assert plan.resident_bytes + step.measured_above_bytes <= budget


@pytest.mark.parametrize("rule", MODELS)
def test_a_refusal_tells_the_least_budget_of_all_rewrites(rule: str) -> None:
    least = smallest(MODELS[rule]())
    assert least <= smallest(MODELS[rule](), rewrites="all")
    assert least < smallest(MODELS[rule](), rewrites="none")
    ebbtide.fit(model := MODELS[rule](), least, progress=None)(data()).backward()
    assert ebbtide.calls_of(model).planned == 1


@pytest.mark.parametrize("budget", ["200%", "100%"])
def test_nobody_looks_at_them_where_the_step_fits(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> Iterator[tuple[Rewrite, ...]]:
        pytest.fail("asked for candidates")
        yield ()

    for rule in RULES:
        if rule.name != "gradient-recompute":
            monkeypatch.setattr(type(rule), "candidates", asked)
    model = ebbtide.fit(Wide(), int(1.5 * smallest_that_fits()) if budget == "100%" else budget, progress=None)
    model(data()).backward()
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.rewritten is None


def smallest_that_fits() -> int:
    return ebbtide.plan(
        Wide(), (data(),), budget="200%", options=ebbtide.Options(rewrites="none", progress=None)
    ).baseline_peak_bytes


# -- which are looked at ------------------------------------------------------------------------------------------


def program_of(model: nn.Module) -> Program:
    return capture_program(model, (data(),), {})[1]


def planned(program: Program, budget: int, alternatives: Alternatives, hints: Hints | None = None) -> ebbtide.Plan:
    def one(candidate: Program, rewritten: Rewritten | None) -> ebbtide.Plan:
        options = PlanningOptions(effort=50, rewritten=rewritten)
        return make_plan(candidate, Budget(bytes=budget), resident_bytes=0, options=options)

    return best_of(program, alternatives, budget, one, hints=hints)


def with_seconds(program: Program, share: float) -> Program:
    """``program`` with forward ops that take ``share`` of all of its time: what making them again costs."""
    total = float(len(program.ops))
    early = [op.name for op in program.ops[: program.boundary]]
    each = share * total / max(len(early), 1)
    ops = tuple(replace(op, seconds=each if op.name in early else total / len(program.ops)) for op in program.ops)
    return replace(program, ops=ops)


@pytest.mark.parametrize(("room", "looked"), [(0.75, False), (0.02, True)])
def test_further_ones_are_looked_at_where_the_first_give_no_plan(room: float, looked: bool) -> None:
    program = with_seconds(program_of(Deep()), 2.0)
    asked: list[str] = []

    def further() -> Iterator[Alternative]:
        asked.append("further")
        return iter(())

    with pytest.raises(BudgetError) if looked else nullcontext():
        planned(program, int(room * unplanned_bytes(program)), Alternatives(tuple, further))
    assert bool(asked) == looked


def test_to_see_whether_there_are_any_the_first_are_enough() -> None:
    program = program_of(Deep())
    rewrites = (Rewrite("made up", "x", "", "smaller", ()),)
    one = Alternative(rewrites, lambda: program, lambda: Costed(rewrites, program))
    asked: list[str] = []

    def further() -> Iterator[Alternative]:
        asked.append("further")
        yield one

    assert next(iter(Alternatives(lambda: [one], further)), None) is one
    assert not asked
    found = Alternatives(tuple, further)
    assert [each.rewrites for each in found] == [rewrites]
    assert [each.rewrites for each in found.further] == [rewrites]
    assert asked == ["further"]


def test_of_a_dear_plan_and_another_one_the_cheaper_wins() -> None:
    program = with_seconds(program_of(Deep()), 2.0)
    budget = int(0.75 * unplanned_bytes(program))
    dear = planned(program, budget, Alternatives(tuple))
    rewrites = (Rewrite("made up", "x", "", "smaller", ()),)
    for factor, wins in ((1.0 + dear.overhead / 2, True), (1.0 + 2 * dear.overhead, False)):
        buffers = tuple(replace(each, bytes=each.bytes // 2) for each in program.buffers)
        ops = tuple(replace(op, seconds=op.seconds * factor) for op in program.ops)
        smaller = replace(program, buffers=buffers, ops=ops)
        other = Alternative(rewrites, lambda made=smaller: made, lambda made=smaller: Costed(rewrites, made))
        plan = planned(program, budget, Alternatives(lambda other=other: [other]))
        assert (plan.rewritten is not None) == wins
        assert plan.step_seconds <= dear.step_seconds


def test_a_refusal_that_was_caught_holds_nothing() -> None:
    """Whoever plans something else instead goes on with the arguments of the call alone, without the collector."""
    program = program_of(Deep())

    def caught() -> weakref.ref[object]:
        held = torch.nn.Identity()
        with suppress(BudgetError):
            planned(program, 1, Alternatives(tuple))
        return weakref.ref(held)

    gc.disable()
    try:
        assert caught()() is None
    finally:
        gc.enable()


def test_what_another_shapes_plan_rewrites_is_looked_at_first() -> None:
    """The others are made where that gives no plan of about as little overhead, and only there."""
    program = with_seconds(program_of(Deep()), 2.0)
    budget = int(0.75 * unplanned_bytes(program))
    made: list[str] = []

    def other(form: str, factor: float, rows: int) -> Alternative:
        rewrites = (Rewrite("made up", "x", "", form, (("rows", rows),)),)
        buffers = tuple(replace(each, bytes=each.bytes // 2) for each in program.buffers)
        ops = tuple(replace(op, seconds=op.seconds * factor) for op in program.ops)
        smaller = replace(program, buffers=buffers, ops=ops)
        return Alternative(rewrites, lambda: made.append(form) or smaller, lambda: Costed(rewrites, smaller))

    def overhead_with(hints: Hints | None, rows: int = 8) -> float:
        made.clear()
        return planned(
            program, budget, Alternatives(lambda: [other("a", 1.1, rows), other("b", 1.2, rows)]), hints
        ).overhead

    assert overhead_with(None) == pytest.approx(0.1)
    assert set(made) == {"a", "b"}
    before = planned(program, budget, Alternatives(lambda: [other("b", 1.15, 16)]))
    hints = Hints.of([before], program, budget)
    assert overhead_with(hints) == pytest.approx(0.1), "b at 1.2 is dearer than it was"
    hints = Hints.of([planned(program, budget, Alternatives(lambda: [other("b", 1.2, 16)]))], program, budget)
    assert overhead_with(hints) == pytest.approx(0.2)
    assert set(made) == {"b"}
    tighter = Hints.of([before], program, 2 * budget)
    assert tighter == Hints(), "a plan of a tighter budget says nothing"
