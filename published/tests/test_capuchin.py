"""Capuchin: what it swaps and what it recomputes, on steps where both are known.

In a layered step of ten buffer ``i`` is read by op ``i + 1`` and then by op ``19 - i``, of ops that take a second: its
free time is ``17 - 2 * i`` seconds less both transfers. Unplanned, the step peaks before op 10 with 1001 bytes.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.planners import Answer, Problem, Status, planner_named
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_bytes, unplanned_schedule
from layered import SIZE, layered, linked, offloaded, reloads, reruns, sound
from random_moves import random_links
from strategies import chain, examples, programs

TEN = layered(10)
PEAK = 1001


def asked(leave: int, rate: float, program: Program = TEN) -> Answer:
    """The plan for a budget that wants ``leave`` buffers gone at the peak."""
    problem = Problem(program, unplanned_bytes(program) - leave * SIZE, machine=linked(rate), tiers=("host",))
    return sound(problem, planner_named("capuchin")(problem))


@pytest.mark.parametrize(
    ("rate", "swapped"),
    [(10.0, True), (0.25, True), (0.15, True), (0.118, True), (0.117, False), (0.1, False)],  # 2 / 17 = 0.1176
)
def test_swap_where_free_time_hides_both_transfers_else_recompute(rate: float, swapped: bool) -> None:
    answer = asked(1, rate)
    assert offloaded(answer.schedule) == ({0} if swapped else set())
    assert reruns(answer.schedule) == ([] if swapped else [0])
    assert answer.schedule is not None
    waited = simulate(TEN, answer.schedule, linked(rate)).waited_seconds
    # At 0.118 the budget has no room for the buffer from op 9, before its copy is written, up to op 11.
    assert waited == pytest.approx(2 / rate - 15.0 if rate == 0.118 else 0.0)


def test_longest_free_time_first() -> None:
    assert unplanned_bytes(TEN) == PEAK
    for count in (1, 2, 4):
        assert offloaded(asked(count, 100.0).schedule) == set(range(count))


@pytest.mark.parametrize(("rate", "stage"), [(10.0, 18), (1.0, 18), (0.5, 17), (0.3, 15)])
def test_the_in_trigger_is_the_last_access_that_is_early_enough(rate: float, stage: int) -> None:
    assert reloads(asked(1, rate).schedule) == [(0, stage)]


def test_lanes_that_are_full_hide_nothing_more() -> None:
    """At four seconds each way out ends at 6 and 10, ways back begin at 15 and 11; a third has no time left."""
    program = layered(10, seconds=[1.0] * 5 + [0.5] + [1.0] * 4)
    answer = asked(3, 0.25, program)
    assert offloaded(answer.schedule) == {0, 1}
    assert reruns(answer.schedule) == [5], "which saves most per second"


def test_msps_counts_the_chain_as_it_has_become() -> None:
    """After 5, which is cheap, and 0, buffer 1 would need 0 again: 2 saves more per second."""
    program = layered(10, seconds=[1.0] * 5 + [0.5] + [1.0] * 4)
    answer = asked(3, 0.01, program)
    assert offloaded(answer.schedule) == set()
    assert reruns(answer.schedule) == [5, 2, 0]


def test_what_cannot_run_again_is_swapped_although_that_waits() -> None:
    ops = tuple(replace(op, rerunnable=False) for op in TEN.ops)
    answer = asked(1, 0.1, replace(TEN, ops=ops))
    assert offloaded(answer.schedule) == {0}
    assert answer.notes["chosen"] == "1 swapped, 1 of them not hidden, 0 recomputed"
    assert answer.schedule is not None
    assert simulate(TEN, answer.schedule, linked(0.1)).waited_seconds > 0.0


def test_what_no_tier_takes_is_recomputed() -> None:
    problem = Problem(TEN, PEAK - SIZE, machine=linked(10.0, least=SIZE + 1), tiers=("host",))
    answer = sound(problem, planner_named("capuchin")(problem))
    assert offloaded(answer.schedule) == set()
    assert len(reruns(answer.schedule)) == 1


def test_what_fits_is_kept_and_without_a_tier_there_is_no_plan() -> None:
    assert asked(0, 1.0).schedule == unplanned_schedule(TEN)
    answer = planner_named("capuchin")(Problem(TEN, 3 * SIZE))
    assert (answer.status, answer.schedule) == (Status.INFEASIBLE, None)
    assert "no tier" in answer.notes["chosen"]
    tight = Problem(TEN, SIZE, machine=linked(1.0), tiers=("host",))
    assert planner_named("capuchin")(tight).schedule is None


@pytest.mark.parametrize("rate", [0.01, 0.3, 10.0])
def test_on_a_chain_budgets_are_met_down_to_a_few_layers(rate: float) -> None:
    program = chain(12)
    for share in (0.8, 0.6, 0.4):
        problem = Problem(program, int(share * unplanned_bytes(program)), machine=linked(rate), tiers=("host",))
        assert sound(problem, planner_named("capuchin")(problem)).schedule is not None


@settings(max_examples=examples(80))
@given(program=programs(max_ops=14), seed=st.integers(0, 10**6), share=st.floats(0.3, 1.1))
def test_every_answer_is_legal_within_its_budget_and_the_same_again(program: Program, seed: int, share: float) -> None:
    links = random_links(random.Random(seed))
    machine = replace(linked(1.0), links=links)
    problem = Problem(program, int(share * unplanned_bytes(program)), machine=machine, tiers=tuple(links))
    answer = sound(problem, planner_named("capuchin")(problem))
    assert answer == planner_named("capuchin")(problem)


def test_what_a_chain_has_left_at_a_later_peak_is_swapped() -> None:
    """All of 0, 1 and 2 leave. The chain that makes 2 for op 5 leaves 0 and 1 beside the 200 bytes of op 6.

    With 1 swapped, 2 is made from it alone, and op 6 runs within 302 bytes.
    """
    reads = [(), (0,), (1,), (2,), (3,), (2, 4), (5,), (1, 6), (0, 7)]
    takes = (0, 0, 0, 0, 300, 0, 200, 0, 0)
    ops = tuple(Op(f"op{i}", "", each, (i,), workspace_bytes=takes[i], seconds=1.0) for i, each in enumerate(reads))
    buffers = tuple(Buffer(f"b{i}", SIZE if i < 3 else 1, i) for i in range(len(reads)))
    program = Program("left", ops, buffers, 5, (), (8,), ())
    problem = Problem(program, 310, machine=linked(0.1), tiers=("host",))
    answer = sound(problem, planner_named("capuchin")(problem))
    assert 1 in offloaded(answer.schedule)
    assert 2 in reruns(answer.schedule)
