"""TFLMS: what its two versions swap and when it comes back, on steps where both are known."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import UsageError
from ebbtide.planners import Answer, Problem, Status, planner_named
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Offload
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_bytes, unplanned_schedule
from ebbtide_published.planners.tflms_graph import Levels
from layered import SIZE, layered, linked, offloaded, reloads, reruns, sound
from random_moves import random_links
from strategies import examples, programs

ROOM = 10**6
TEN = layered(10)  # buffer i is made by op i and read by op 19 - i, whose levels are their numbers


def asked(text: str, program: Program = TEN, rate: float = 10.0, budget: int = ROOM) -> Answer:
    problem = Problem(program, budget, machine=linked(rate), tiers=("host",))
    return sound(problem, planner_named(f"tflms:{text}")(problem))


def twice_read(gap: int) -> Program:
    """A step whose first buffer is read by two ops of the backward, ``gap`` levels apart."""
    forward, backward = 4, 10
    ops: list[Op] = []
    buffers: list[Buffer] = []
    for i in range(forward + backward):
        reads = {i - 1} if i else set[int]()
        if i in (forward + 3, forward + 3 + gap):
            reads.add(0)
        ops.append(Op(f"op{i}", "f", tuple(sorted(reads)), (i,), seconds=1.0))
        buffers.append(Buffer(f"b{i}", SIZE, i))
    return Program("twice", tuple(ops), tuple(buffers), forward, (), (forward + backward - 1,), ())


@pytest.mark.parametrize("count", [1, 3, 8])
def test_n_tensors_counts_from_the_start(count: int) -> None:
    assert offloaded(asked(f"version=1,n_tensors={count}").schedule) == set(range(count))


def test_the_walk_is_breadth_first() -> None:
    """Of two branches, whose ops alternate nowhere in captured order, the walk takes one step of each in turn."""
    reads = ((), (0,), (1,), (0,), (3,), (2, 4), (5, 4), (6, 2), (7, 3), (8, 1), (9, 0))
    ops = tuple(Op(f"op{i}", "f", each, (i,), seconds=1.0) for i, each in enumerate(reads))
    program = Program("branches", ops, tuple(Buffer(f"b{i}", 8, i) for i in range(len(ops))), 6, (), (10,))
    for count, gone in ((1, {0}), (2, {0, 1}), (3, {0, 1, 3}), (4, {0, 1, 2, 3}), (5, {0, 1, 2, 3, 4})):
        answer = asked(f"n_tensors={count},lb=0,ctrld_strategy=direct_order", program)
        assert offloaded(answer.schedule) == gone


def test_n_tensors_0_turns_it_off_and_more_than_there_are_are_all() -> None:
    off = asked("n_tensors=0")
    assert off.schedule == unplanned_schedule(TEN)
    assert "n_tensors=0" in off.notes["chosen"]
    assert offloaded(asked("n_tensors=1000").schedule) == set(range(9)), "the last one would come back at once"


@pytest.mark.parametrize(
    ("text", "ahead"),
    [
        # By the chain rule the trigger is what reads, in the backward, what is made lb steps after the buffer.
        ("lb=1", 0),
        ("lb=4", 3),
        ("lb=4,ub=5", 3),
        # In direct order it is more than lb levels before the reader, and the way back begins after it.
        ("lb=1,ctrld_strategy=direct_order", 1),
        ("lb=4,ctrld_strategy=direct_order", 4),
        ("lb=4,ub=6,ctrld_strategy=direct_order", 4),
        ("lb=4,ub=5,ctrld_strategy=direct_order", None),  # nothing is more than 4 and less than 5 levels away
        ("lb=4,ub=4", None),
    ],
)
def test_lb_and_ub_are_the_window_of_the_trigger(text: str, ahead: int | None) -> None:
    answer = asked(f"n_tensors=3,{text}")
    expected = [] if ahead is None else [(i, 19 - i - ahead) for i in (2, 1, 0)]
    assert reloads(answer.schedule) == expected


def test_next_to_the_boundary_the_chain_rule_is_direct_order() -> None:
    """Of op 13, four levels before are in the forward; of op 12, there is nothing; op 11 is near its op: lb is 1."""
    stages = dict(reloads(asked("n_tensors=9,lb=4").schedule))
    assert {b: 19 - b - stage for b, stage in stages.items()} == {0: 3, 1: 3, 2: 3, 3: 3, 4: 3, 5: 3, 6: 4, 8: 0}


@pytest.mark.parametrize(("text", "count"), [("lb=1", 2), ("lb=1,fuse_swapins=true", 1)])
def test_fused_swap_ins_serve_all_readers(text: str, count: int) -> None:
    answer = asked(f"n_tensors=1,{text},ctrld_strategy=direct_order", twice_read(5))
    assert [b for b, _ in reloads(answer.schedule)] == [0] * count


def test_what_is_there_when_the_next_swap_in_is_triggered_stays() -> None:
    answer = asked("n_tensors=1,lb=3,ctrld_strategy=direct_order", twice_read(3))
    assert reloads(answer.schedule) == [(0, 4)], "the next one would be triggered before the first reader"


def test_branches_far_away_in_the_forward_are_swapped_too() -> None:
    reads = ((), (0,), (1,), (2,), (3, 0), (4, 3), (5, 0))
    ops = tuple(Op(f"op{i}", "f", tuple(sorted(each)), (i,), seconds=1.0) for i, each in enumerate(reads))
    program = Program("skip", ops, tuple(Buffer(f"b{i}", 8, i) for i in range(7)), 5, (), (6,))
    for threshold, expected in ((2, [(0, 3), (0, 5)]), (3, [(0, 5)])):
        text = f"n_tensors=1,branch_threshold={threshold},ctrld_strategy=direct_order"
        assert reloads(asked(text, program).schedule) == expected


def test_without_n_tensors_the_fewest_that_fit_are_found() -> None:
    for budget in (9 * SIZE, 6 * SIZE):
        answer = asked("version=1", budget=budget, rate=2.0)
        count = len(offloaded(answer.schedule))
        assert asked(f"version=1,n_tensors={count}", budget=budget, rate=2.0).schedule == answer.schedule
        assert asked(f"version=1,n_tensors={count - 1}", budget=budget, rate=2.0).status is Status.INFEASIBLE


@pytest.mark.parametrize("threshold", [1, 10, 17])
def test_version_2_swaps_for_readers_beyond_the_threshold(threshold: int) -> None:
    answer = asked(f"swapout_threshold={threshold},swapin_ahead=1,swapin_groupby=0")
    gone = {i for i in range(10) if 19 - 2 * i > threshold}
    assert offloaded(answer.schedule) == gone
    assert all(stage == 19 - b - 1 for b, stage in reloads(answer.schedule))


@pytest.mark.parametrize("ahead", [0, 1, 3, 6])
def test_swapin_ahead_is_a_distance_in_levels(ahead: int) -> None:
    answer = asked(f"swapout_threshold=12,swapin_ahead={ahead},swapin_groupby=0")
    assert reloads(answer.schedule) == [(i, 19 - i - ahead) for i in (3, 2, 1, 0)]


def test_a_swap_in_without_a_trigger_comes_right_before_its_reader() -> None:
    answer = asked("swapout_threshold=18,swapin_ahead=19,swapin_groupby=0")
    assert reloads(answer.schedule) == [(0, 19)]


@pytest.mark.parametrize(("groupby", "expected"), [(0, [(0, 7), (0, 11)]), (3, [(0, 7), (0, 11)]), (4, [(0, 7)])])
def test_swapin_groupby_joins_readers_within_so_many_levels(groupby: int, expected: list[tuple[int, int]]) -> None:
    answer = asked(f"swapout_threshold=1,swapin_ahead=0,swapin_groupby={groupby}", twice_read(4))
    assert [each for each in reloads(answer.schedule) if each[0] == 0] == expected


def test_sync_modes_wait_for_copies_or_for_ways_back() -> None:
    def waits(mode: int) -> float:
        answer = asked(f"swapout_threshold=14,swapin_ahead=3,swapin_groupby=0,sync_mode={mode}", rate=1.0)
        assert answer.schedule is not None
        return simulate(TEN, answer.schedule, linked(1.0)).waited_seconds

    assert waits(0) == 0.0  # three buffers, a second each way, as each op
    assert waits(2) == 3.0  # each reader waits a second for what it reads
    assert waits(1) == 0.0  # a copy ends with the op that reads its buffer
    assert waits(3) == 3.0
    slow = asked("swapout_threshold=14,swapin_ahead=3,swapin_groupby=0,sync_mode=1", rate=0.5).schedule
    assert slow is not None
    assert simulate(TEN, slow, linked(0.5)).waited_seconds > 0.0


def test_serialised_levels_are_counted_anew() -> None:
    """Op 0 feeds ops 1, 2 and 3 of one level, which feed op 4; of three ops in a row level 1 becomes three levels."""
    reads = ((), (0,), (0,), (0,), (1, 2, 3), (4,))
    ops = tuple(Op(f"op{i}", "f", each, (i,), seconds=1.0) for i, each in enumerate(reads))
    program = Program("wide", ops, tuple(Buffer(f"b{i}", 8, i) for i in range(6)), 6, (5,))
    assert Levels(program).of == [0, 1, 1, 1, 2, 3]
    assert Levels(program, {1}).of == [0, 1, 2, 3, 4, 5]
    far = "swapin_ahead=0,swapin_groupby=0,swapout_threshold=2"
    assert offloaded(asked(far, program).schedule) == set[int]()
    assert offloaded(asked(f"{far},serialization=1", program).schedule) == {0, 1}
    assert offloaded(asked(f"{far},serialization=all", program).schedule) == {0, 1}
    assert offloaded(asked(f"{far},serialization=0+3:5", program).schedule) == set[int]()


def test_tuning_finds_the_largest_threshold_then_the_earliest_swap_ins() -> None:
    for budget in (9 * SIZE, 5 * SIZE):
        answer = asked("version=2", budget=budget, rate=3.0)
        chosen = dict(pair.split("=") for pair in answer.notes["chosen"].split(","))
        assert asked(answer.notes["chosen"], budget=budget, rate=3.0).schedule == answer.schedule
        threshold, ahead = int(chosen["swapout_threshold"]), int(chosen["swapin_ahead"])
        first = "swapin_ahead=1,swapin_groupby=0"
        assert asked(f"swapout_threshold={threshold},{first}", budget=budget, rate=3.0).schedule is not None
        # distances are odd: two thresholds further there is one buffer less
        assert asked(f"swapout_threshold={threshold + 2},{first}", budget=budget, rate=3.0).schedule is None
        earlier = f"swapout_threshold={threshold},swapin_ahead={ahead + 1},swapin_groupby=0"
        assert asked(earlier, budget=budget, rate=3.0).schedule is None


def test_what_fits_is_left_alone_by_tuning() -> None:
    assert asked("version=2", budget=unplanned_bytes(TEN)).schedule == unplanned_schedule(TEN)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("version=3", "version=3 is not accepted"),
        ("lb=5,ub=4", "lb=5 is more than ub=4"),
        ("n_tensors=-1", "n_tensors=-1 is not accepted"),
        ("swapin_ahead=-1", "swapin_ahead=-1 is not accepted"),
        ("sync_mode=4", "sync_mode=4 is not accepted"),
        ("version=2,n_tensors=4", "n_tensors is a setting of version 1"),
        ("version=1,sync_mode=1", "sync_mode is a setting of version 2"),
        ("lb=2,swapin_ahead=1", "lb is a setting of version 1, swapin_ahead is not"),
        ("serialization=1+x", "'x' is no level"),
        ("swapin_ahaed=4", "it has no 'swapin_ahaed'; did you mean 'swapin_ahead'"),
    ],
)
def test_settings_that_do_not_go_are_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError) as raised:
        planner_named(f"tflms:{text}")
    assert why in str(raised.value)
    assert "ctrld_strategy=chain_rule|direct_order" in str(raised.value)


@settings(max_examples=examples(60))
@given(program=programs(max_ops=14))
def test_levels_are_longest_paths(program: Program) -> None:
    outputs = [program.buffers[b].producer for b in program.forward_outputs]

    @cache
    def depth(op: int) -> int:
        before = [program.buffers[b].producer for b in program.ops[op].inputs]
        before = [each for each in before if each is not None] + [
            o for o in outputs if None in before and o is not None
        ]
        behind = [depth(each) for each in range(program.boundary)] if op >= program.boundary else []
        return max((each + 1 for each in (*map(depth, before), *behind)), default=0)

    levels = Levels(program)
    assert levels.of == [depth(op) for op in range(len(program.ops))]
    assert all(levels.of[a] < levels.of[b] for b in range(len(levels.of)) for a in range(b) if levels.reaches(a, b))


TEXTS = (
    "version=2",
    "version=1",
    "n_tensors=3,lb=2,branch_threshold=1",
    "n_tensors=5,lb=0,fuse_swapins=true,ctrld_strategy=direct_order",
    "swapout_threshold=1,swapin_ahead=2,swapin_groupby=2,serialization=all",
    "swapout_threshold=2,sync_mode=3",
)


@settings(max_examples=examples(60))
@given(program=programs(max_ops=14), seed=st.integers(0, 10**6), share=st.floats(0.3, 1.1), text=st.sampled_from(TEXTS))
def test_every_answer_is_legal_within_its_budget_and_the_same_again(
    program: Program, seed: int, share: float, text: str
) -> None:
    links = random_links(random.Random(seed))
    machine = replace(linked(1.0), links=links)
    problem = Problem(program, int(share * unplanned_bytes(program)), machine=machine, tiers=tuple(links))
    answer = sound(problem, planner_named(f"tflms:{text}")(problem))
    assert answer == planner_named(f"tflms:{text}")(problem)
    if answer.schedule is not None:
        assert reruns(answer.schedule) == []
        out = [a.buffer for a in answer.schedule.actions if isinstance(a, Offload)]
        assert len(out) == len(set(out))


def test_without_a_tier_there_is_the_unplanned_step_or_none() -> None:
    assert planner_named("tflms")(Problem(TEN, ROOM)).schedule == unplanned_schedule(TEN)
    assert planner_named("tflms")(Problem(TEN, SIZE)).status is Status.INFEASIBLE
