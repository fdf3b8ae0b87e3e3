"""``auto`` is never worse at a larger budget, and has a plan wherever one is known to exist."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.planners import Problem, planner_named
from ebbtide.planners.search.smallest import smallest_of, smallest_schedule
from ebbtide.step.program import Program
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from strategies import examples, programs

EFFORT = 300


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
