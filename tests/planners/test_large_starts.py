"""What only large programs have: a descent from what was carried over, slower lanes, and more work for repairs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.planners.base import Interrupt, Problem
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.hybrid import bounds, portfolio
from ebbtide.planners.registry import planner_named
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.planners.search.smallest import _descended
from ebbtide.step.legality import check
from ebbtide.step.machine import Link
from ebbtide.step.program import Program
from ebbtide.step.simulate import overhead_of
from ebbtide.step.unplanned import unplanned_bytes
from layered import layered, linked
from random_schedule import random_schedule
from strategies import programs


@given(programs(), st.integers(0, 99))
def test_a_descent_ends_no_higher_than_it_starts(program: Program, seed: int) -> None:
    from ebbtide.planners.search.interval_state import reruns_of

    start = reruns_of(program, random_schedule(program, seed, drop=0.3)) or []
    state = IntervalState(program)
    state.load(start)
    before = state.peak_bytes
    _descended(state, 50, Interrupt(), early=False, start=start)
    assert floor_bytes(program)[0] <= state.peak_bytes <= before


def test_a_slower_link_is_slower_both_ways() -> None:
    link = Link("host", 100, 8.0, 6.0, latency_seconds=0.5)
    slow = link.slowed(0.5)
    assert (slow.out_bytes_per_second, slow.in_bytes_per_second) == (4.0, 3.0)
    assert (slow.tier, slow.capacity_bytes, slow.latency_seconds) == ("host", 100, 0.5)


@pytest.mark.parametrize("rate", [0.3, 0.6, 1.5])
def test_starts_with_slower_lanes_make_no_plan_worse(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    program = layered(20, sizes=[100, 60, 140, 80] * 5, seconds=[1.0, 0.3, 2.0, 0.7] * 5)
    machine, budget = linked(rate), int(0.45 * unplanned_bytes(program))
    told: list[str] = []

    def overhead() -> float:
        problem = Problem(
            program, budget, machine=machine, tiers=("host",), effort=300, progress=lambda each: told.append(each.stage)
        )
        schedule = planner_named("auto")(problem).schedule
        assert schedule is not None
        assert not check(program, schedule, budget, machine.links)
        return overhead_of(program, schedule, machine)

    monkeypatch.setattr(portfolio, "ROUNDS", 0)
    without = overhead()
    assert "cut relaxation with slower lanes" not in told
    monkeypatch.setattr(portfolio, "LARGE_OPS", 10)
    assert overhead() <= without + 1e-12


def test_a_large_program_has_more_work_for_its_repairs(monkeypatch: pytest.MonkeyPatch) -> None:
    program = layered(20)
    given = list[float]()
    allow = portfolio._Incumbent.allow

    def noted(self: portfolio._Incumbent, times: float = 1.0) -> None:
        given.append(times)
        allow(self, times)

    monkeypatch.setattr(portfolio._Incumbent, "allow", noted)
    problem = Problem(program, int(0.5 * unplanned_bytes(program)), machine=linked(0.6), tiers=("host",), effort=100)
    planner_named("auto")(problem)
    assert set(given) == {1.0}
    monkeypatch.setattr(portfolio, "LARGE_OPS", 20)
    planner_named("auto")(problem)
    assert max(given) == 4.0


def test_a_large_program_has_a_second_cut() -> None:
    assert [bounds._most_cuts(ops) for ops in (100, 600, 1_000, 3_000, 15_000, 40_000)] == [17, 2, 1, 2, 2, 1]
