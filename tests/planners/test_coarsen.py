"""Coarse programs are programs, lifted schedules are legal and no bigger, and fusing keeps the optimum."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ebbtide.planners import Problem, Status, planner_named
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.reductions.coarsen import Coarse, by_layer, fuse, layers, planned_coarse
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.step import legality
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Free, Offload, Schedule
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from oracle.brute_force import optimal_overhead
from random_schedule import random_schedule
from strategies import chain, examples, programs, reruns


def unplanned_bytes(program: Program) -> int:
    return simulate(program, unplanned_schedule(program)).above_bytes


def assert_lifts(coarse: Coarse, schedule: Schedule) -> None:
    fine = coarse.lift(schedule)
    below, above = simulate(coarse.fine, fine), simulate(coarse.program, schedule)
    assert not legality.check(coarse.program, schedule)
    assert not legality.check(coarse.fine, fine)
    assert below.above_bytes <= above.above_bytes
    assert below.seconds == pytest.approx(above.seconds)


@st.composite
def tilted(draw: st.DrawFn, max_ops: int) -> Program:
    """Programs with workspaces that vary more, so that either end of a pair can make the peak."""
    program = draw(programs(max_ops=max_ops, max_tangents=1))
    sizes = draw(st.lists(st.sampled_from([0, 0, 4, 20]), min_size=len(program.ops), max_size=len(program.ops)))
    return program.with_costs([op.seconds for op in program.ops], sizes)


@given(data=st.data(), program=programs(max_ops=14))
def test_lifted_schedules_are_legal_no_bigger_and_as_long(data: st.DataObject, program: Program):
    labels = data.draw(st.lists(st.integers(0, 2), min_size=len(program.ops), max_size=len(program.ops)))
    for coarse in (by_layer(program, labels), fuse(program)):
        assert [o for group in coarse.members for o in group] == list(range(len(program.ops)))
        assert coarse.program.seconds == pytest.approx(program.seconds)
        state = IntervalState(coarse.program)
        state.load(data.draw(reruns(coarse.program)))
        assert_lifts(coarse, state.to_schedule())


@given(data=st.data(), program=programs(max_ops=14), seed=st.integers(0, 99))
def test_lifting_takes_any_order_of_reruns(data: st.DataObject, program: Program, seed: int):
    labels = data.draw(st.lists(st.integers(0, 1), min_size=len(program.ops), max_size=len(program.ops)))
    for coarse in (by_layer(program, labels), fuse(program)):
        schedule = random_schedule(coarse.program, seed, drop=0.2)
        assume(not legality.check(coarse.program, schedule))
        assert_lifts(coarse, schedule)


@given(program=programs())
def test_groups_of_one_change_nothing(program: Program):
    assert by_layer(program, range(len(program.ops))).program == program


def test_a_group_of_which_a_rerun_makes_nothing_takes_what_its_first_run_takes():
    """Its one output is a mutation that only the first run makes."""
    ops = (
        Op("a", "t", (), (0,), workspace_bytes=4, seconds=1.0),
        Op("b", "t", (0,), (1, 2), seconds=1.0, repeat="t again", once=1),
    )
    program = Program("p", ops, (Buffer("a", 1, 0), Buffer("b", 0, 1), Buffer("new", 1, 1)), 2, mutations=(2,))
    coarse = fuse(program).program
    assert len(coarse.ops) == 1
    assert unplanned_bytes(coarse) == unplanned_bytes(program) == 5


def test_a_group_of_which_nobody_reads_anything_takes_what_its_first_run_takes():
    """Its rerun would hold another peak, beside an output that only the first run makes."""
    ops = (
        Op("a", "t", (), (0,), seconds=1.0),
        Op("b", "t", (), (1,), workspace_bytes=4, seconds=1.0),
        Op("c", "t", (1,), (2, 3), seconds=1.0, repeat="t again", once=1),
    )
    buffers = (Buffer("a", 0, 0), Buffer("b", 1, 1), Buffer("c", 0, 2), Buffer("new", 1, 2))
    program = Program("p", ops, buffers, 3, mutations=(0, 3))
    coarse = fuse(program).program
    assert len(coarse.ops) == 1
    assert unplanned_bytes(coarse) == unplanned_bytes(program) == 5


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(program=tilted(max_ops=6), shares=st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3))
def test_fusing_keeps_the_optimum(program: Program, shares: list[float]):
    coarse = fuse(program)
    assume(len(coarse.program.ops) < len(program.ops))
    floor, _ = floor_bytes(program)
    for share in (0.0, *shares):
        budget = int(floor + share * (unplanned_bytes(program) - floor))
        best = optimal_overhead(program, budget)
        assert optimal_overhead(coarse.program, budget) == (None if best is None else pytest.approx(best))


def small(reads: list[tuple[int, ...]], sizes: list[int], workspaces: list[int]) -> Program:
    """Ops with one buffer each; the last is a gradient."""
    buffers = tuple(Buffer(f"b{o}", size, o) for o, size in enumerate(sizes))
    ops = tuple(Op(f"op{o}", "test", read, (o,), workspace_bytes=workspaces[o]) for o, read in enumerate(reads))
    return Program("small", ops, buffers, 0, gradients=(len(ops) - 1,))


@pytest.mark.parametrize(
    ("workspaces", "fused"), [((0, 0), True), ((3, 9), True), ((9, 0), False)], ids=["none", "second", "first"]
)
def test_ops_wait_for_their_reader_unless_their_own_peak_is_higher(workspaces: tuple[int, int], fused: bool):
    program = small([(), (), (), (1, 2), (0, 3)], [8, 8, 8, 8, 1], [0, 0, *workspaces, 0])
    assert fuse(program).members == (((0,), (1, 2, 3), (4,)) if fused else ((0,), (1,), (2,), (3,), (4,)))


def test_a_reader_goes_with_the_op_whose_peak_hides_it():
    program = small([(), (), (0,), (2,), (1, 3)], [8, 8, 8, 4, 1], [0, 0, 5, 1, 0])
    assert fuse(program).members == ((0,), (1,), (2, 3), (4,))


def test_a_small_input_of_a_big_reader_is_held_so_nothing_is_fused():
    program = small([(), (), (0, 1), (0, 2)], [8, 2, 8, 1], [0, 0, 0, 0])
    assert fuse(program).members == ((0,), (1,), (2,), (3,))


def test_a_coarse_op_takes_what_its_members_take():
    program = small([(), (0,), (1,), (0, 2)], [8, 10, 4, 1], [0, 5, 7, 0])
    coarse = by_layer(program, "abbc")
    # First 10 + 5, then 10 + 4 + 7, of which 4 are its output.
    assert coarse.program.ops[1].workspace_bytes == 17
    assert coarse.program.ops[1].inputs == (0,)
    assert unplanned_bytes(coarse.program) == unplanned_bytes(program) == 29


def test_planned_coarse_is_within_budget_and_says_what_its_bound_is_for():
    program = chain(12)
    labels = [o // 2 if o < program.boundary else 100 + (o - program.boundary) // 3 for o in range(len(program.ops))]
    budget = int(0.6 * unplanned_bytes(program))
    problem = Problem(program, budget, effort=500)
    grouped = planned_coarse(planner_named("auto"), problem, by_layer(program, labels))
    assert grouped.schedule is not None
    assert not legality.check(program, grouped.schedule, budget)
    assert grouped.bound_class.endswith("ops: grouped")
    exact = planned_coarse(planner_named("auto"), problem, fuse(program))
    assert exact.schedule is not None
    assert exact.bound_class == "order: program, boundary: captured, tiers: none, costs: given"
    roomy = replace(problem, above_budget_bytes=unplanned_bytes(program))
    assert planned_coarse(planner_named("auto"), roomy, by_layer(program, labels)).status is Status.OPTIMAL


def test_layers_are_module_paths_and_ops_without_one_stand_alone():
    program = chain(2)
    ops = tuple(replace(op, module="" if o == 1 else "net.block.linear") for o, op in enumerate(program.ops))
    program = replace(program, ops=ops)
    assert layers(program, depth=2)[:3] == ["net.block", "op 1", "net.block"]
    assert layers(program)[0] == "net.block.linear"
    assert by_layer(program, layers(program)).members[:3] == ((0,), (1,), (2, 3))


def test_wrong_input_is_named():
    program = chain(2)
    with pytest.raises(ValueError, match="3 for 9"):
        by_layer(program, [0, 0, 0])
    moved = Schedule((Offload(0, "host"), Free(0)))
    with pytest.raises(ValueError, match="moves buffers"):
        by_layer(program, range(len(program.ops))).lift(moved)
