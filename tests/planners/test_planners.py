"""Planners against the optimum of tiny programs, and their promises on larger ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import BudgetError
from ebbtide.planners import Interrupt, Problem, Status, planner_named
from ebbtide.planners.base import AS_CAPTURED, PROGRAM_ORDER
from ebbtide.planners.bounds.cut_bound import cut_bound
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.search.smallest import smallest_schedule
from ebbtide.planning.pipeline import make_plan
from ebbtide.step import legality
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide.units import Budget
from oracle.brute_force import optimal_overhead
from strategies import GIVEN_BACK, chain, examples, programs


def overhead_of(program: Program, schedule) -> float:
    return simulate(program, schedule).seconds / program.seconds - 1.0


@given(program=programs(max_ops=6, max_tangents=1, held_bytes=GIVEN_BACK), share=st.floats(0.0, 1.0))
def test_against_the_optimum(program: Program, share: float):
    unplanned = simulate(program, unplanned_schedule(program)).above_bytes
    floor, _ = floor_bytes(program)
    budget = int(floor + share * (unplanned - floor))
    best = optimal_overhead(program, budget)
    cut = cut_bound(program, budget)
    if best is None:
        assert planner_named("greedy")(Problem(program, budget, effort=200)).schedule is None
        return
    assert not cut.infeasible
    assert cut.bound <= best + 1e-6
    for name in ("greedy", "auto"):
        answer = planner_named(name)(Problem(program, budget, effort=200))
        if answer.schedule is not None:
            assert not legality.check(program, answer.schedule, budget)
            assert overhead_of(program, answer.schedule) >= best - 1e-9
            if answer.status is Status.OPTIMAL:
                assert overhead_of(program, answer.schedule) <= best + 2e-6


@given(program=programs(max_ops=6, max_tangents=1, held_bytes=GIVEN_BACK))
def test_no_schedule_lies_below_the_floor(program: Program):
    floor, _ = floor_bytes(program)
    assert floor == 0 or optimal_overhead(program, floor - 1) is None
    smallest, schedule = smallest_schedule(program, effort=200)
    assert smallest >= floor
    assert simulate(program, schedule).above_bytes == smallest
    assert optimal_overhead(program, smallest) is not None


@pytest.mark.parametrize("again", [True, False])
def test_with_the_boundary_elsewhere_less_may_do_than_floor_and_bound_say_and_they_say_so(again: bool) -> None:
    """The second op depends on no tangent: run before the boundary, it lets go of what the first made."""
    made, read = Op("made", "t", (), (0,), seconds=1.0, rerunnable=again), Op("read", "t", (0,), (1,), seconds=1.0)
    buffers = (Buffer("large", 10, 0), Buffer("small", 1, 1))
    program = Program("early", (made, read), buffers, 1, gradients=(1,), between_bytes=5)
    elsewhere, budget = Schedule.from_computes(program, [0, 1, None]), 12
    assert not legality.check(program, elsewhere, budget)
    assert overhead_of(program, elsewhere) == 0.0
    assert PROGRAM_ORDER == "order: program, boundary: captured, tiers: none, costs: given"
    if again:
        answer = planner_named("auto")(Problem(program, budget, effort=50))
        assert answer.bound_class == PROGRAM_ORDER
        assert answer.schedule is not None
        assert overhead_of(program, answer.schedule) == optimal_overhead(program, budget) == 0.5
        return
    floor, _ = floor_bytes(program)
    assert floor > simulate(program, elsewhere).above_bytes
    with pytest.raises(BudgetError, match=rf"floor +{floor} B +{floor} bytes  of plans with {AS_CAPTURED}: pinned"):
        make_plan(program, Budget(bytes=budget), resident_bytes=0)


@settings(max_examples=examples(50))
@given(program=programs(max_ops=30), share=st.floats(0.0, 1.0))
def test_plans_are_legal_and_within_budget(program: Program, share: float):
    unplanned = simulate(program, unplanned_schedule(program)).above_bytes
    budget = int(share * unplanned)
    for name in ("greedy", "auto"):
        answer = planner_named(name)(Problem(program, budget, effort=100))
        if answer.schedule is None:
            assert answer.status is Status.INFEASIBLE
        else:
            assert not legality.check(program, answer.schedule, budget)
            assert simulate(program, answer.schedule).above_bytes <= budget


@pytest.mark.parametrize("share", [0.8, 0.5, 0.3])
def test_chain_is_solved_near_its_bound(share: float):
    program = chain(24)
    unplanned = simulate(program, unplanned_schedule(program)).above_bytes
    answer = planner_named("auto")(Problem(program, int(share * unplanned), effort=2000))
    assert answer.schedule is not None
    assert answer.bound is not None
    assert answer.bound - 1e-6 <= overhead_of(program, answer.schedule) <= answer.bound + 0.02


@settings(max_examples=examples(50))
@given(program=programs(max_ops=30))
def test_auto_fits_whatever_budget_the_smallest_schedule_fits(program: Program):
    smallest, schedule = smallest_schedule(program, effort=100)
    for seeds in ((), (schedule,)):
        answer = planner_named("auto")(Problem(program, smallest, effort=100, seeds=seeds))
        assert answer.schedule is not None
        assert simulate(program, answer.schedule).above_bytes <= smallest


def test_plans_are_reproducible():
    program = chain(16)
    problem = Problem(program, int(0.4 * simulate(program, unplanned_schedule(program)).above_bytes), effort=500)
    assert planner_named("auto")(problem) == planner_named("auto")(problem)


def test_an_interrupt_keeps_the_best_so_far():
    program = chain(16)
    interrupt = Interrupt()
    unplanned = unplanned_schedule(program)
    budget = int(0.5 * simulate(program, unplanned).above_bytes)
    stages: list[str] = []

    def stop(progress) -> None:
        stages.append(progress.stage)
        if progress.best_overhead is not None:
            interrupt.set()

    answer = planner_named("auto")(Problem(program, budget, interrupt=interrupt, progress=stop))
    assert answer.status in (Status.TIME_LIMIT, Status.OPTIMAL)
    assert answer.schedule is not None
    assert stages


def test_a_seed_is_never_worsened():
    program = chain(12)
    tight = int(0.3 * simulate(program, unplanned_schedule(program)).above_bytes)
    seed = planner_named("greedy")(Problem(program, tight, effort=500)).schedule
    assert seed is not None
    answer = planner_named("greedy")(Problem(program, tight + 3, effort=0, seeds=(seed,)))
    assert answer.schedule is not None
    assert overhead_of(program, answer.schedule) <= overhead_of(program, seed)
