"""Where local search may place a rerun: right before its use, or before that where its inputs live anyway."""

from __future__ import annotations

import pytest

from ebbtide.planners import Problem, planner_named
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.simulate import overhead_of

WIDE, NARROW = 8, 4


@pytest.fixture
def program() -> Program:
    """``narrow`` is made of ``wide``, in the way at op 3 and read at op 6; ``wide`` may not live through op 5."""
    buffers = (
        Buffer("wide", WIDE, 0),
        Buffer("narrow", NARROW, 1),
        Buffer("read", 0, 2),
        Buffer("big", 0, 3),
        Buffer("last use of wide", 0, 4),
        Buffer("bigger", 0, 5),
        Buffer("late use of narrow", 0, 6),
    )
    ops = (
        Op("wide", "test", (), (0,), seconds=10.0),
        Op("narrow", "test", (0,), (1,), seconds=1.0),
        Op("read", "test", (1,), (2,), seconds=1.0),
        Op("big", "test", (0,), (3,), seconds=1.0, workspace_bytes=3),
        Op("last use of wide", "test", (0,), (4,), seconds=1.0),
        Op("bigger", "test", (), (5,), seconds=1.0, workspace_bytes=6),
        Op("late use of narrow", "test", (1,), (6,), seconds=1.0),
    )
    return Program("early", ops, buffers, len(ops), gradients=(6,))


@pytest.mark.parametrize("seed", range(4))
def test_a_rerun_goes_where_its_inputs_live_anyway(program: Program, seed: int) -> None:
    budget = WIDE + NARROW
    answer = planner_named("greedy")(Problem(program, budget, effort=500, seed=seed))
    assert answer.schedule is not None
    assert overhead_of(program, answer.schedule) == pytest.approx(1.0 / program.seconds)
