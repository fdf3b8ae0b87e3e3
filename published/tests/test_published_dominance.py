"""``auto`` is never worse than any other planner that keeps captured order, on random programs and on chains."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.planners import Interrupt, Problem, missing_package, planner_named, planner_names
from ebbtide.planners.search.smallest import smallest_schedule
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


def test_every_extra_that_is_asked_for_is_there() -> None:
    assert not [name for name in OTHERS if missing_package(name)]
