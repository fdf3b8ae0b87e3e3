"""Every reduction keeps the contract: a legal problem that stands for the whole, and schedules that come back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide._api.estimate import capture_ahead
from ebbtide.options import Options
from ebbtide.planners import Problem
from ebbtide.planners.reductions.base import ExactReduction, StartReduction
from ebbtide.planners.reductions.coarsen import by_layer, fuse
from ebbtide.planners.reductions.proxy import proxy_of
from ebbtide.planners.reductions.reorder import reorder
from ebbtide.planners.reductions.repeats import find_repeats, with_blocks
from ebbtide.planners.search.greedy import greedy
from ebbtide.planners.search.interval_state import IntervalState, reruns_of
from ebbtide.planners.search.orders import precedences
from ebbtide.step.legality import check
from ebbtide.step.program import Program
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_bytes, unplanned_schedule
from ebbtide.zoo import GPTConfig, gpt
from random_schedule import random_schedule
from strategies import programs


def other_order(program: Program, keys: list[int]) -> list[int | None]:
    """A legal order of first runs: of all that may come next, the one with the least key."""
    boundary = len(program.ops)
    before: dict[int, set[int]] = {op: set() for op in range(boundary + 1)}
    for first, second in precedences(program):
        before[second].add(first)
    order: list[int | None] = []
    while before:
        ready = [op for op, waits in before.items() if not waits & before.keys()]
        chosen = min(ready, key=lambda op: (keys[op % len(keys)], op))
        del before[chosen]
        order.append(None if chosen == boundary else chosen)
    return order


def exact_reductions(program: Program, keys: list[int]) -> list[ExactReduction]:
    labels = [key // 3 for key in range(len(program.ops))]
    return [fuse(program), by_layer(program, labels), reorder(program, other_order(program, keys))]


@given(programs(), st.integers(0, 99), st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_an_exact_reduction_gives_a_schedule_of_the_same_seconds_and_no_more_bytes(
    program: Program, seed: int, keys: list[int]
) -> None:
    problem = Problem(program, unplanned_bytes(program), effort=7, seed=seed, seeds=(unplanned_schedule(program),))
    for reduction in exact_reductions(program, keys):
        reduced = reduction.reduce(problem)
        assert reduced.problem.program == reduction.program
        same = replace(reduced.problem, program=program, seeds=problem.seeds)
        assert same == problem, "budget, effort, seed, interrupt and progress are the problem's own"
        for known in reduced.problem.seeds:
            assert reruns_of(reduction.program, known) is not None
        schedule = random_schedule(reduction.program, seed, drop=0.3)
        lifted = reduced.lift(schedule)
        assert check(program, lifted) == []
        theirs, ours = simulate(reduction.program, schedule), simulate(program, lifted)
        assert ours.seconds == pytest.approx(theirs.seconds)
        assert ours.above_bytes <= theirs.above_bytes


@given(programs(), st.integers(0, 99), st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_seeds_in_the_new_order_are_translated_and_others_are_left_out(
    program: Program, seed: int, keys: list[int]
) -> None:
    order = other_order(program, keys)
    moved = reorder(program, order)
    fitting = moved.lift(random_schedule(moved.program, seed, drop=0.3))
    captured = unplanned_schedule(program)
    problem = Problem(program, 0, seeds=(fitting, captured))
    same_ops = [op for op in order if op is not None] == list(range(len(program.ops)))
    seeds = moved.reduce(problem).problem.seeds
    assert moved.lift(seeds[0]) == fitting
    assert len(seeds) == (2 if same_ops else 1)


@pytest.mark.slow
def test_a_stand_in_gives_start_points_within_its_program_at_a_budget_that_means_as_much() -> None:
    case = gpt(2, GPTConfig(vocabulary=64, length=16, layers=6, width=16, heads=2, dropout=0.1))
    captured = find_repeats(
        capture_ahead(case.model, case.args, case.kwargs, options=Options(machine="v100-16gb")).program
    )
    assert captured is not None
    program = with_blocks(captured, 140).program
    small = proxy_of(program)
    assert small is not None
    reduction: StartReduction = small
    unplanned, few = unplanned_bytes(program), unplanned_bytes(small.program)
    whole = reduction.reduce(Problem(program, unplanned, effort=300))
    assert whole.problem.above_budget_bytes == few, "all of it stands for all of it"
    share = small.small.repeats.blocks / small.whole.blocks
    tight = reduction.reduce(Problem(program, round(0.6 * unplanned), effort=300))
    assert few - tight.problem.above_budget_bytes == pytest.approx(share * 0.4 * unplanned, rel=0.01)
    assert tight.problem.seeds == ()
    schedule = greedy(tight.problem).schedule
    assert schedule is not None
    starts = list(tight.lift(schedule))
    assert starts
    state = IntervalState(program)
    for reruns in starts:
        state.load(reruns)
        carried = state.to_schedule()
        assert check(program, carried) == []
        assert simulate(program, carried).above_bytes < 0.75 * unplanned
