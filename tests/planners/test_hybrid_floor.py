"""The floor with tiers: reached where everything may leave, never above a schedule's peak where not everything may."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.hybrid.choice import Choice, schedule_of
from ebbtide.planners.hybrid.floor import floor_with_tiers
from ebbtide.step.legality import check
from ebbtide.step.machine import Link, Machine
from ebbtide.step.program import Program
from ebbtide.step.simulate import simulate
from strategies import programs

LINK = Link("host", 10**9, 1.0, 1.0)
MACHINE = Machine("test", "cpu", 0, {"float32": 1.0}, 1.0, 0.0, 1, {"host": LINK})


def all_moved(program: Program) -> Choice:
    """Whatever may leave is loaded for every op that reads it."""
    loads = {(b, t) for b in program.movable for t in program.readers[b]}
    return Choice(loads=frozenset(loads), tiers={b: "host" for b, _ in loads})


def partly_whole(program: Program, seed: int) -> Program:
    rng = random.Random(seed)
    return replace(program, buffers=tuple(replace(b, whole=rng.random() < 0.5) for b in program.buffers))


@given(program=programs())
def test_the_floor_is_reached_where_everything_may_leave(program: Program):
    schedule = schedule_of(program, all_moved(program))
    floor, op = floor_with_tiers(program)
    assert not check(program, schedule, floor, {"host": LINK})
    assert simulate(program, schedule, MACHINE).above_bytes == floor
    assert 0 <= op <= len(program.ops)


@given(program=programs(), seed=st.integers(0, 99), least=st.integers(0, 9))
def test_what_may_not_leave_counts_as_without_tiers(program: Program, seed: int, least: int):
    program = partly_whole(program, seed)
    links = {"host": replace(LINK, least_bytes=least)}
    floor, _ = floor_with_tiers(program, links)
    assert floor_with_tiers(program)[0] <= floor <= floor_bytes(program)[0]
    assert floor_with_tiers(program, {}) == floor_bytes(program)
    choice = all_moved(program)
    choice = replace(choice, loads=frozenset((b, t) for b, t in choice.loads if program.buffers[b].bytes >= least))
    above = simulate(program, schedule_of(program, choice), MACHINE).above_bytes
    assert floor <= above
