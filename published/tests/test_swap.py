"""Meng et al.'s swapping: which feature maps stay and when the others come back, on steps where both are known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import BudgetError
from ebbtide.planners import Problem, Status, planner_named
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.step.program import Program
from ebbtide.step.schedule import Offload
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_bytes, unplanned_schedule
from ebbtide.units import Budget
from layered import SIZE, freed_before, layered, linked, offloaded, reloads, reruns, sound
from random_moves import random_links
from strategies import examples, programs

ROOM = 10**6


def at(threshold: int, program: Program, rate: float = 10.0, budget: int = ROOM) -> Problem:
    problem = Problem(program, budget, machine=linked(rate), tiers=("host",))
    answer = sound(problem, planner_named(f"swap:threshold_bytes={threshold}")(problem))
    assert answer.schedule is not None
    return Problem(program, budget, seeds=(answer.schedule,))


@pytest.mark.parametrize(
    ("threshold", "gone"),
    [
        (0, {0, 1, 2, 3, 4, 5}),
        (49, {0, 1, 2, 3, 4, 5}),
        (50, {0, 1, 2, 3, 4}),  # 5 stays, the one next to the loss
        (89, {0, 1, 2, 3, 4}),
        (90, {0, 1, 2, 3}),
        (119, {0, 1, 2, 3}),  # 3 has 30 bytes; 2 and 1 would fit beside 4 and 5, but come after it
        (120, {0, 1, 2}),
        (160, set[int]()),
    ],
)
def test_the_threshold_is_spent_from_the_loss_backwards(threshold: int, gone: set[int]) -> None:
    program = layered(6, sizes=(10, 10, 20, 30, 40, 50))
    assert offloaded(at(threshold, program).seeds[0]) == gone


def test_a_threshold_above_all_keeps_all_and_says_so() -> None:
    program = layered(4)
    problem = Problem(program, ROOM, machine=linked(1.0), tiers=("host",))
    answer = planner_named(f"swap:threshold_bytes={4 * SIZE}")(problem)
    assert answer.schedule == unplanned_schedule(program)
    assert "room for all 4 feature maps" in answer.notes["chosen"]
    options = PlanningOptions(machine=linked(1.0), tiers=("host",), planner=f"swap:threshold_bytes={4 * SIZE}")
    plan = make_plan(program, Budget(bytes=ROOM), resident_bytes=0, options=options)
    assert "chosen     nothing: the threshold has room for all 4 feature maps" in plan.details
    tight = Problem(program, unplanned_bytes(program) - 1, machine=linked(1.0), tiers=("host",))
    assert planner_named(f"swap:threshold_bytes={4 * SIZE}")(tight).status is Status.INFEASIBLE


@pytest.mark.parametrize(
    ("rate", "trigger"),
    [(1.0, 1), (0.5, 2), (0.34, 3), (10.0, 1)],  # a transfer takes that many ops, rounded up
)
def test_the_way_back_begins_as_late_as_it_may_without_blocking(rate: float, trigger: int) -> None:
    """Buffer ``i`` is read by op ``19 - i`` of ones that take a second; ops begin at whole seconds."""
    program = layered(10)
    schedule = at(9 * SIZE, program, rate).seeds[0]
    assert offloaded(schedule) == {0}
    assert reloads(schedule) == [(0, 19 - trigger)]
    assert freed_before(schedule, 0, 15), "and leaves long before"
    assert simulate(program, schedule, linked(rate)).seconds == program.seconds, "nothing waits"


def test_without_time_the_way_back_begins_with_the_backward() -> None:
    program = layered(4)
    schedule = at(3 * SIZE, program, rate=0.1).seeds[0]
    assert reloads(schedule) == [(0, 4)]
    schedule = at(0, program, rate=0.1).seeds[0]
    assert [stage for b, stage in reloads(schedule) if b == 3] == [4]


def test_each_comes_back_once_and_is_never_run_again() -> None:
    program = layered(8)
    schedule = at(2 * SIZE, program, rate=0.7).seeds[0]
    assert sorted(b for b, _ in reloads(schedule)) == list(range(6))
    assert reruns(schedule) == []


def test_without_a_threshold_the_largest_that_fits_is_found() -> None:
    program, card = layered(12), linked(2.0)
    for budget in (11 * SIZE, 9 * SIZE, 6 * SIZE):
        problem = Problem(program, budget, machine=card, tiers=("host",))
        answer = sound(problem, planner_named("swap")(problem))
        assert answer.schedule is not None
        threshold = int(answer.notes["threshold_bytes"])
        again = planner_named(f"swap:threshold_bytes={threshold}")(problem)
        assert again.schedule == answer.schedule
        assert planner_named(f"swap:threshold_bytes={threshold + SIZE}")(problem).schedule is None
    easy = Problem(program, unplanned_bytes(program), machine=card, tiers=("host",))
    assert planner_named("swap")(easy).schedule == unplanned_schedule(program)


def test_a_tier_takes_what_it_has_room_for() -> None:
    program = layered(6)
    problem = Problem(program, ROOM, machine=linked(1.0, capacity=2 * SIZE), tiers=("host",))
    answer = sound(problem, planner_named("swap:threshold_bytes=0")(problem))
    assert offloaded(answer.schedule) == {0, 1}
    small = Problem(program, ROOM, machine=linked(1.0, least=SIZE + 1), tiers=("host",))
    answer = planner_named("swap:threshold_bytes=0")(small)
    assert answer.schedule == unplanned_schedule(program)
    assert "no feature map may leave" in answer.notes["chosen"]


def test_without_a_tier_there_is_the_unplanned_step_or_none() -> None:
    program = layered(6)
    assert planner_named("swap")(Problem(program, ROOM)).schedule == unplanned_schedule(program)
    answer = planner_named("swap")(Problem(program, 2 * SIZE))
    assert (answer.status, answer.schedule) == (Status.INFEASIBLE, None)
    assert "no tier is given" in answer.notes["chosen"]


def test_a_budget_below_the_floor_is_refused_as_for_auto() -> None:
    program, card = layered(6), linked(1.0)
    errors: list[BudgetError] = []
    for planner in ("auto", "swap"):
        options = PlanningOptions(machine=card, tiers=("host",), planner=planner, effort=200)
        with pytest.raises(BudgetError) as raised:
            make_plan(program, Budget(bytes=SIZE), resident_bytes=0, options=options)
        errors.append(raised.value)
    assert str(errors[0]) == str(errors[1])


def test_a_program_whose_backward_reads_nothing_is_kept() -> None:
    program = layered(3)
    alone = Program("forward", program.ops[:3], program.buffers[:3], 3, forward_outputs=(2,))
    problem = Problem(alone, ROOM, machine=linked(1.0), tiers=("host",))
    assert planner_named("swap:threshold_bytes=0")(problem).schedule == unplanned_schedule(alone)


@settings(max_examples=examples(60))
@given(
    program=programs(max_ops=14), seed=st.integers(0, 10**6), share=st.floats(0.3, 1.1), threshold=st.integers(-1, 30)
)
def test_every_answer_is_legal_within_its_budget_and_the_same_again(
    program: Program, seed: int, share: float, threshold: int
) -> None:
    links = random_links(random.Random(seed))
    card = linked(1.0)
    machine = type(card)("toy", "cuda", 10**9, card.flops, 1.0, 0.0, 1, links=links)
    problem = Problem(program, int(share * unplanned_bytes(program)), machine=machine, tiers=tuple(links))
    name = "swap" if threshold < 0 else f"swap:threshold_bytes={threshold}"
    answer = sound(problem, planner_named(name)(problem))
    assert answer == planner_named(name)(problem)
    if answer.schedule is not None:
        out = [a.buffer for a in answer.schedule.actions if isinstance(a, Offload)]
        assert all((program.buffers[b].producer or 0) < program.boundary for b in out)
        assert reruns(answer.schedule) == []
