"""Which alternatives are made at all, and which of them is planned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from ebbtide.errors import BudgetError
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.planning import one_program
from ebbtide.planning.alternatives import Alternative, Alternatives, Costed, best_of
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.report.plan import Plan
from ebbtide.step.program import Program
from ebbtide.step.rewrite import Rewrite, Rewritten
from ebbtide.step.schedule import Schedule
from ebbtide.units import Budget
from strategies import chain

CAPTURED = chain(8, activation_bytes=1000)


def scaled(size: float, seconds: float = 1.0) -> Program:
    """The captured program with other activations, and ops that take longer."""
    buffers = tuple(replace(each, bytes=round(each.bytes * size)) for each in CAPTURED.buffers)
    return replace(CAPTURED, buffers=buffers).with_costs(
        [op.seconds * seconds for op in CAPTURED.ops], [0] * len(CAPTURED.ops)
    )


class Sliced:
    """Alternatives of a form in sizes, the least floor last; ``made`` says of which the program was looked at."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int]] = []

    def of(self, form: str, *programs: Program) -> list[Alternative]:
        return [self._one(form, size, program) for size, program in enumerate(programs)]

    def _one(self, form: str, size: int, program: Program) -> Alternative:
        rewrites = (Rewrite("slices", "gelu0", "", form, (("rows", size),)),)

        def make() -> Program:
            self.made.append((form, size))
            return program

        return Alternative(rewrites, make, partial(Costed, rewrites, program))


def planned(alternatives: list[Alternative], budget: int) -> Plan:
    def plan_one(program: Program, rewritten: Rewritten | None) -> Plan:
        options = PlanningOptions(planner="greedy", rewritten=rewritten)
        return make_plan(program, Budget(bytes=budget), resident_bytes=0, options=options)

    return best_of(CAPTURED, Alternatives(lambda: alternatives), budget, plan_one)


def test_of_a_form_that_does_not_fit_only_the_least_is_made() -> None:
    sliced = Sliced()
    budget = floor_bytes(scaled(0.5))[0]
    large = sliced.of("large", *map(scaled, (0.9, 0.8, 0.7)))
    small = sliced.of("small", *map(scaled, (0.7, 0.5, 0.4)))
    plan = planned([*large, *small], budget)
    assert plan.rewritten is not None
    assert plan.rewritten.rewrites[0].form == "small"
    assert sliced.made == [("large", 2), ("small", 2), ("small", 1), ("small", 0)]


def test_what_takes_longer_than_finer_slices_ends_a_form() -> None:
    sliced = Sliced()
    budget = floor_bytes(scaled(0.7))[0]
    falling = sliced.of("falling", scaled(0.6, 1.1), scaled(0.5, 1.3), scaled(0.4, 1.2))
    plan = planned(falling, budget)
    assert plan.rewritten is not None
    assert sliced.made == [("falling", 2), ("falling", 1)]


def test_a_refusal_asks_the_least_of_each_form() -> None:
    sliced = Sliced()
    budget = floor_bytes(scaled(0.1))[0]
    with pytest.raises(BudgetError) as raised:
        planned([*sliced.of("one", *map(scaled, (0.9, 0.6))), *sliced.of("two", *map(scaled, (0.8, 0.5)))], budget)
    assert sliced.made == [("one", 1), ("two", 1)]
    least = planned(sliced.of("two", scaled(0.5)), raised.value.smallest_bytes)
    assert least.budget_bytes == raised.value.smallest_bytes


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """Programs of which the smallest budget is looked for."""
    found: list[Program] = []

    def counted(program: Program, *given: Any) -> tuple[int, Schedule]:
        found.append(program)
        return smallest_of(program, *given)

    monkeypatch.setattr(one_program, "smallest_of", counted)
    return found


def test_the_smallest_budget_is_looked_for_once_for_the_plan_that_is_taken(looked_at: list[Program]) -> None:
    sliced = Sliced()
    tried = [*sliced.of("dear", scaled(0.6, 1.2)), *sliced.of("cheap", scaled(0.6, 1.1))]
    options = PlanningOptions(alternatives=Alternatives(lambda: tried))
    plan = make_plan(CAPTURED, Budget(bytes=floor_bytes(scaled(0.8))[0]), resident_bytes=0, options=options)
    assert plan.rewritten is not None
    assert plan.smallest_is_searched
    assert [each.fingerprint for each in looked_at] == [plan.program.fingerprint]
    assert plan.smallest_bytes == smallest_of(plan.program)[0]


def test_a_refusal_does_not_ask_programs_that_need_more_by_their_floor(looked_at: list[Program]) -> None:
    sliced = Sliced()
    tried = [*sliced.of("one", scaled(0.9)), *sliced.of("two", scaled(0.3))]
    options = PlanningOptions(alternatives=Alternatives(lambda: tried))
    budget = floor_bytes(scaled(0.1))[0]
    assert smallest_of(scaled(0.3))[0] < floor_bytes(scaled(0.9))[0]
    with pytest.raises(BudgetError) as raised:
        make_plan(CAPTURED, Budget(bytes=budget), resident_bytes=0, options=options)
    assert {each.fingerprint for each in looked_at} == {scaled(0.3).fingerprint}
    assert raised.value.smallest_bytes == smallest_of(scaled(0.3))[0]
