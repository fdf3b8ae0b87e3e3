"""Repeated blocks: found, left out and put in again, and plans carried across."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from ebbtide._api.estimate import capture_ahead
from ebbtide.options import Options
from ebbtide.planners import Interrupt, Problem, planner_named
from ebbtide.planners.bounds.cut_bound import cut_bounds
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.reductions.proxy import proxy_of
from ebbtide.planners.reductions.repeats import Repeats, carry, find_repeats, isomorphic_ops, with_blocks
from ebbtide.planners.reductions.starts import linear_start
from ebbtide.planners.search.interval_state import IntervalState, reruns_of
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.simulate import simulate
from ebbtide.zoo import GPTConfig, gpt
from papers import paper_model

pytestmark = pytest.mark.slow


@functools.cache
def layers(count: int) -> Program:
    case = gpt(2, GPTConfig(vocabulary=64, length=16, layers=count, width=16, heads=2, dropout=0.1))
    return capture_ahead(case.model, case.args, case.kwargs, options=Options(machine="v100-16gb")).program


@functools.cache
def steps(count: int) -> Program:
    case = paper_model("lstm_lm")(2, vocabulary=32, length=count, width=8)
    return capture_ahead(case.model, case.args, case.kwargs, options=Options(machine="v100-16gb")).program


def repeats(program: Program) -> Repeats:
    found = find_repeats(program)
    assert found is not None
    return found


def meaning(program: Program) -> object:
    """All that planners see, without names and in an order of outputs that depends on nothing."""
    ops = [(op.target, op.inputs, op.outputs, op.seconds, op.workspace_bytes, op.state_bytes) for op in program.ops]
    kept = [sorted(each) for each in (program.forward_outputs, program.gradients, program.mutations)]
    return ops, [(b.bytes, b.producer) for b in program.buffers], program.boundary, kept


@pytest.mark.parametrize(("have", "want"), [(5, 5), (5, 7), (7, 5), (5, 12)])
def test_a_transformer_with_other_layers_is_what_capture_gives(have: int, want: int) -> None:
    tiled = with_blocks(repeats(layers(have)), want)
    assert meaning(tiled.program) == meaning(layers(want))
    assert meaning(repeats(tiled.program).program) == meaning(layers(want))


def test_time_steps_are_blocks_in_both_directions() -> None:
    found = repeats(steps(12))
    assert {region.sign for region in found.regions} == {1, -1}
    fewer = with_blocks(found, found.blocks - 4).program
    gone = len(steps(12).ops) - len(fewer.ops)
    assert gone == 4 * sum(region.period for region in found.regions)
    assert IntervalState(fewer).peak_bytes < IntervalState(steps(12)).peak_bytes


def test_where_nothing_repeats_nothing_is_found() -> None:
    ops = [Op(f"o{i}", f"t{i}", (i - 1,) if i else (), (i,), seconds=1.0) for i in range(40)]
    buffers = tuple(Buffer(f"b{i}", 8, i) for i in range(40))
    assert find_repeats(Program("p", tuple(ops), buffers, 20, forward_outputs=(19,), gradients=(39,))) is None


def planned(program: Program, share: float) -> list[tuple[int, int]]:
    peak = IntervalState(program).peak_bytes
    answer = planner_named("auto")(Problem(program, int(share * peak), effort=400))
    assert answer.schedule is not None
    reruns = reruns_of(program, answer.schedule)
    assert reruns
    return reruns


def test_a_plan_carried_to_the_same_blocks_is_the_plan() -> None:
    found = repeats(layers(6))
    same = with_blocks(found, 6).repeats
    reruns = planned(layers(6), 0.6)
    assert sorted(carry(reruns, found, same, range(6))) == sorted(reruns)


def test_a_plan_carried_to_more_blocks_saves_as_much_per_block() -> None:
    few = repeats(layers(6))
    many = with_blocks(few, 30).repeats
    reruns = planned(layers(6), 0.6)
    stands_for = [0, 1, *(2 + j % 2 for j in range(26)), 4, 5]
    state, unplanned = IntervalState(many.program), IntervalState(many.program).peak_bytes
    carried = carry(reruns, few, many, stands_for)
    state.load(carried)
    assert sorted(state.reruns) == sorted(set(carried)), "every rerun that is carried is legal"
    small = IntervalState(layers(6))
    small_unplanned = small.peak_bytes
    small.load(reruns)
    saved, saved_by_small = unplanned - state.peak_bytes, small_unplanned - small.peak_bytes
    assert saved > 3 * saved_by_small


def test_a_large_program_is_planned_from_its_proxy() -> None:
    program = with_blocks(repeats(layers(6)), 140).program
    small = proxy_of(program)
    assert small is not None
    assert len(small.program.ops) < len(program.ops) / 3
    budget = (floor_bytes(program)[0] + IntervalState(program).peak_bytes) // 2
    stages: list[str] = []
    problem = Problem(program, budget, effort=400, progress=lambda known: stages.append(known.stage))
    answer = planner_named("auto")(problem)
    assert "planning repeated blocks once" in stages
    assert answer.schedule is not None
    timeline = simulate(program, answer.schedule)
    assert timeline.above_bytes <= budget
    assert answer.bound is not None
    assert timeline.seconds / program.seconds - 1.0 <= answer.bound + 0.02


@pytest.mark.parametrize(("make", "size", "few", "many"), [(layers, 6, 6, 6), (layers, 6, 9, 40), (steps, 12, 9, 30)])
def test_isomorphic_ops_call_the_same_and_read_from_isomorphic_ops(
    make: Callable[[int], Program], size: int, few: int, many: int
) -> None:
    program = make(size)
    small, large = (with_blocks(repeats(program), blocks) for blocks in (few, many))
    stands_for = [*range(few - 2), *(few - 3 for _ in range(many - few)), few - 2, few - 1]
    found = isomorphic_ops(small.repeats, large.repeats, stands_for)
    if few == many:
        assert list(found.op) == list(range(len(small.program.ops)))
        assert list(found.buffer) == [-1, *range(1, len(small.program.buffers))], "tangents have none"
    known = [(op, small.program.ops[found.op[i]]) for i, op in enumerate(large.program.ops) if found.op[i] >= 0]
    assert len(known) > 0.9 * len(large.program.ops)
    assert all((op.target, op.seconds) == (other.target, other.seconds) for op, other in known)
    reads = [(found.buffer[b], other.inputs) for op, other in known for b in op.inputs if found.buffer[b] >= 0]
    assert sum(b in inputs for b, inputs in reads) > 0.9 * len(reads)


class Counted(Interrupt):
    """Counts how often it is looked at: the simplex method does so at each iteration."""

    asked = 0

    def __bool__(self) -> bool:
        self.asked += 1
        return False


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_the_linear_bound_of_a_large_program_begins_at_its_proxys_optimum(share: float) -> None:
    program = with_blocks(repeats(layers(6)), 140).program
    small = proxy_of(program)
    assert small is not None
    floor = floor_bytes(program)[0]
    budget = floor + int(share * (IntervalState(program).peak_bytes - floor))
    start = linear_start(Problem(program, budget), small)
    assert start is not None
    cold, warm = Counted(), Counted()
    (bound,) = cut_bounds(program, budget, cold, state=IntervalState(program))
    (same,) = cut_bounds(program, budget, warm, state=IntervalState(program), start=start)
    assert bound.bound > 0.001
    assert same.bound == pytest.approx(bound.bound, abs=1e-7)
    assert warm.asked < cold.asked / 10


def test_a_small_program_has_no_proxy() -> None:
    assert proxy_of(layers(6)) is None
