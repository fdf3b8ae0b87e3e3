"""``auto`` is never worse than any other planner that keeps captured order, and never worse at a larger budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.planners import Interrupt, Problem, missing_extra, planner_named, planner_names
from ebbtide.planners.search.smallest import smallest_of, smallest_schedule
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from strategies import chain, examples, programs

FREE_ORDER = ("anneal", "auto_free")
OTHER_PROCESS = ("retention",)  # constraint programming in a child: seconds each, see test_retention
EFFORT = 300
SOLVER_SECONDS = 1.0
SAME_OPTIMUM = ("checkmate_free",)  # as checkmate, more slowly
OTHERS = [name for name in planner_names() if name not in (*FREE_ORDER, *OTHER_PROCESS, *SAME_OPTIMUM, "auto")]


def overhead_at(program: Program, name: str, budget: int, seeds: tuple[Schedule, ...] = ()) -> float:
    # Solvers end by the clock here; auto does not.
    interrupt = Interrupt() if name == "auto" else Interrupt(SOLVER_SECONDS)
    answer = planner_named(name)(Problem(program, budget, effort=EFFORT, seeds=seeds, interrupt=interrupt))
    if answer.schedule is None:
        return float("inf")
    return simulate(program, answer.schedule).seconds / program.seconds - 1.0


def better_than_auto(program: Program, share: float) -> dict[str, float]:
    """Whose overhead is less than that of ``auto``, which is the entry ``"auto"`` where there is any."""
    peak = simulate(program, unplanned_schedule(program)).above_bytes
    smallest, _ = smallest_schedule(program, effort=EFFORT)
    budget = int(smallest + share * (peak - smallest))
    ours = overhead_at(program, "auto", budget)
    assert ours < float("inf"), "a budget that is workable has a plan"
    better = {name: theirs for name in OTHERS if (theirs := overhead_at(program, name, budget)) < ours - 1e-6}
    return {**better, "auto": ours} if better else {}


@settings(max_examples=examples(20))
@given(program=programs(max_ops=14), share=st.floats(0.0, 1.0))
def test_no_planner_is_better_on_random_programs(program: Program, share: float) -> None:
    assert better_than_auto(program, share) == {}


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("length", [6, pytest.param(11, marks=pytest.mark.slow)])
def test_no_planner_is_better_on_chains(length: int, share: float) -> None:
    assert better_than_auto(chain(length), share) == {}


@settings(max_examples=examples(20))
@given(program=programs(max_ops=14), shares=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=4))
def test_a_larger_budget_never_costs_more(program: Program, shares: list[float]) -> None:
    peak = simulate(program, unplanned_schedule(program)).above_bytes
    smallest, schedule = smallest_schedule(program, effort=EFFORT)
    seeds, before = (schedule,), float("inf")
    for share in sorted(shares):
        budget = int(smallest + share * (peak - smallest))
        answer = planner_named("auto")(Problem(program, budget, effort=EFFORT, seeds=seeds))
        assert answer.schedule is not None
        overhead = simulate(program, answer.schedule).seconds / program.seconds - 1.0
        assert overhead <= before + 1e-9
        seeds, before = (*seeds, answer.schedule), overhead


@settings(max_examples=examples(40))
@given(program=programs(max_ops=30))
def test_the_smallest_known_budget_always_has_a_plan(program: Program) -> None:
    smallest, _ = smallest_of(program)
    for name in ("auto", "auto_free"):
        assert planner_named(name)(Problem(program, smallest, effort=0)).schedule is not None, name


def test_every_extra_that_is_asked_for_is_there() -> None:
    assert not [name for name in OTHERS if missing_extra(name)]
