"""The path bound is never above the optimum and equals Revolve on unit chains; its plans keep the contract."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.planners import Problem, Status, planner_named
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.chains.bound import path_bound, path_bounds
from ebbtide.planners.chains.find import chains_of, paths_of
from ebbtide.planners.chains.plan import path_reruns, start_from_paths
from ebbtide.planners.search.greedy import Incumbent
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.step import legality
from ebbtide.step.program import Program
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from oracle.brute_force import optimal_overhead
from oracle.chains import mlp_chain, random_chain, unit_chain
from strategies import chain, programs


def unplanned_bytes(program: Program) -> int:
    return simulate(program, unplanned_schedule(program)).above_bytes


def assert_no_path_is_above_the_optimum(program: Program, budget: int) -> float:
    """The highest of the bounds at ``budget``."""
    bounds = [each for path in paths_of(program) if (each := path_bound(program, budget, path)) is not None]
    highest = max((each.bound for each in bounds), default=0.0)
    if highest > 0 or any(each.infeasible for each in bounds):
        best = optimal_overhead(program, budget)
        if best is not None:
            assert not any(each.infeasible for each in bounds)
            assert highest <= best + 1e-9
    return highest


@pytest.mark.parametrize("first", range(0, 600, 200))
def test_no_bound_is_above_the_optimum_of_a_random_chain(first: int):
    positive = 0
    for seed in range(first, first + 200):
        program = random_chain(seed)
        floor, peak = floor_bytes(program)[0], unplanned_bytes(program)
        for budget in sorted({floor, floor + 1, (floor + peak) // 2}):
            positive += assert_no_path_is_above_the_optimum(program, budget) > 0
    assert positive >= 20, "the test compares next to nothing"


@given(program=programs(max_ops=6, max_tangents=1), share=st.floats(0.0, 1.0))
def test_no_bound_is_above_the_optimum_of_a_random_program(program: Program, share: float):
    floor = floor_bytes(program)[0]
    assert_no_path_is_above_the_optimum(program, int(floor + share * (unplanned_bytes(program) - floor)))


def revolve_reruns(stages: int, slots: int) -> int:
    """Griewank & Walther's recurrence, unrolled by hand: forward runs of a unit chain beyond the first sweep."""
    least: dict[tuple[int, int], float] = {}
    for s in range(slots + 1):
        for length in range(stages + 2):
            splits = (m + least[length - m, s - 1] + least[m, s] for m in range(1, length) if s)
            least[length, s] = 0.0 if length <= 1 else min(splits, default=float("inf"))
    return int(least[stages + 1, slots]) - stages


@pytest.mark.parametrize("stages", [1, 2, 3, 8, 24])
def test_bound_and_plan_are_revolves_for_every_number_of_slots(stages: int):
    program = unit_chain(stages)
    for slots in range(1, stages + 1):
        expected = revolve_reruns(stages, slots) / len(program.ops)
        (bound,) = path_bounds(program, slots + 2)
        assert bound.bound == pytest.approx(expected, abs=1e-9)
        state = IntervalState(program)
        state.load(path_reruns(program, slots + 2, bound.path) or [])
        assert state.peak_bytes <= slots + 2
        assert state.overhead == pytest.approx(expected, abs=1e-9)
        answer = planner_named("auto")(Problem(program, slots + 2, effort=0))
        assert answer.status is Status.OPTIMAL
    assert all(each.infeasible for each in path_bounds(program, 2))


def test_revolves_plan_at_one_slot_has_room():
    program = unit_chain(100)
    answer = planner_named("auto")(Problem(program, 3, effort=0))
    assert answer.schedule is not None
    assert simulate(program, answer.schedule).above_bytes == 3
    assert len(answer.schedule.computes) == len(program.ops) + 1 + 100 * 99 // 2


@pytest.mark.parametrize(
    ("program", "times"),
    [(chain(40), times) for times in (1.1, 1.3, 2.0, 3.0)] + [(mlp_chain(24), times) for times in (1.3, 2.0, 3.0)],
)
def test_a_chain_with_gradients_is_planned_near_its_bound(program: Program, times: float):
    budget = int(times * floor_bytes(program)[0])
    answer = planner_named("auto")(Problem(program, budget, effort=500))
    assert answer.schedule is not None
    assert answer.bound is not None
    overhead = simulate(program, answer.schedule).seconds / program.seconds - 1.0
    assert answer.bound - 1e-6 <= overhead <= 1.15 * answer.bound


@given(program=programs(max_ops=30), share=st.floats(0.0, 1.0))
def test_plans_of_any_path_can_be_loaded(program: Program, share: float):
    floor = floor_bytes(program)[0]
    budget = int(floor + share * (unplanned_bytes(program) - floor))
    state = IntervalState(program)
    for path in paths_of(program):
        reruns = path_reruns(program, budget, path)
        if reruns is not None:
            state.load(reruns)
            assert state.reruns == sorted(reruns, key=lambda run: (run[1], run[0]))
            assert not legality.check(program, state.to_schedule())


def test_programs_with_branches_are_no_chains():
    program = random_chain(0)
    assert list(chains_of(program))
    found = Incumbent(Problem(program, unplanned_bytes(program)))
    start_from_paths(found)
    assert found.bound == 0.0
