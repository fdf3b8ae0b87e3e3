"""The simulator and the legality checker's peak against lifetimes recomputed from their definition."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.step.legality import check
from ebbtide.step.machine import catalogue
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Boundary, Compute, Free, Offload, Reload, Schedule
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from strategies import GIVEN_BACK, programs, reruns


def resident_before(program: Program, order: list[int | None], position: int, b: int) -> bool:
    """Whether buffer ``b`` holds bytes just before ``order[position]`` in a canonical schedule."""
    producer = program.buffers[b].producer
    made = any(step == producer for step in order[:position])
    if b in program.mutations:
        return made and None in order[position + 1 :]
    if not made or b in program.pinned:
        return made
    for step in order[position:]:
        if step is not None and b in program.ops[step].inputs:
            return True
        if step == producer:
            return False
    return False


def peak_by_definition(program: Program, order: list[int | None]) -> int:
    most = 0
    for position in range(len(order) + 1):
        step = order[position] if position < len(order) else None
        total = program.held_bytes if None in order[:position] else 0
        total += sum(
            buffer.bytes for b, buffer in enumerate(program.buffers) if resident_before(program, order, position, b)
        )
        for index, op in enumerate(program.ops):
            runs = [k for k, each in enumerate(order) if each == index]
            if len(runs) > 1 and runs[0] <= position <= runs[-1]:
                total += op.state_bytes
                if position in runs[1:]:
                    total += op.state_bytes
        if step is not None:
            op = program.ops[step]
            made = op.outputs[: len(op.outputs) - op.once] if step in order[:position] else op.outputs
            total += op.workspace_bytes + sum(program.buffers[b].bytes for b in made)
        elif position < len(order):
            total += max(program.between_bytes, program.late_bytes)
        most = max(most, total)
    return most


@given(data=st.data())
def test_bytes_are_those_of_the_definition(data: st.DataObject):
    program: Program = data.draw(programs(max_ops=9, held_bytes=GIVEN_BACK))
    state = IntervalState(program)
    state.load(data.draw(reruns(program)))
    expected = peak_by_definition(program, state.order())
    schedule = state.to_schedule()
    assert simulate(program, schedule).above_bytes == expected
    assert not check(program, schedule, expected)
    if expected:
        assert [violation.clause for violation in check(program, schedule, expected - 1)] == [6]


def with_moves(program: Program, schedule: Schedule, random: Random) -> Schedule:
    """``schedule`` with a few buffers offloaded and reloaded where that is legal."""
    # Not mutations: of one that is made again while it is away, the checker counts both copies.
    movable = [b for b in range(len(program.buffers)) if b not in program.mutations]
    for b in random.sample(movable, len(movable)):
        actions = list(schedule.actions)
        for action in (Reload(b), Free(b), Offload(b, "host")):
            actions.insert(random.randrange(len(actions) + 1), action)
        moved = Schedule(tuple(actions))
        schedule = schedule if check(program, moved) else moved
    return schedule


@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_simulator_and_checker_agree_on_the_peak_of_any_legal_schedule(data: st.DataObject, random: Random):
    program: Program = data.draw(programs(held_bytes=GIVEN_BACK))
    state = IntervalState(program)
    state.load(data.draw(reruns(program)))
    schedule = with_moves(program, state.to_schedule(), random)
    peak = simulate(program, schedule, catalogue()["h100-80gb"]).above_bytes
    assert not check(program, schedule, peak)
    if peak:
        assert [violation.clause for violation in check(program, schedule, peak - 1)] == [6]


@given(program=programs(held_bytes=GIVEN_BACK))
def test_unplanned_runs_everything_once(program: Program):
    timeline = simulate(program, unplanned_schedule(program))
    assert timeline.runs.tolist() == [1] * len(program.ops)
    assert abs(timeline.seconds - program.seconds) < 1e-12
    assert timeline.above_bytes == int(timeline.peak_bytes[timeline.peak_action])


def test_a_repeat_of_a_random_op_holds_its_state_and_takes_it_once_more():
    ops = (
        Op("dropout", "d", (), (0,), state_bytes=5, seconds=1.0),
        Op("middle", "m", (), (1,), seconds=1.0),
        Op("user", "u", (0,), (2,), seconds=1.0),
    )
    buffers = (Buffer("a", 10, 0), Buffer("b", 1, 1), Buffer("c", 1, 2))
    program = Program("p", ops, buffers, 3)
    schedule = Schedule((Compute(0), Compute(1), Compute(0), Compute(2), Free(0), Boundary()))
    assert simulate(program, schedule).peak_bytes.tolist() == [15, 6, 20, 11, 0, 0]
    assert not check(program, schedule, 20)
