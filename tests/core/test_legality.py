"""Every clause of legality, broken once."""

from __future__ import annotations

import pytest

from ebbtide.step.legality import check
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Action, Boundary, Compute, Free, Offload, Reload, Schedule

OPS = (
    Op("a", "t", (), (0,), state_bytes=1, seconds=1.0),
    Op("b", "t", (0,), (1,), rerunnable=False, seconds=1.0),
    Op("c", "t", (1,), (2,), reads_mutated=True, seconds=1.0),
    Op("d", "t", (2, 4), (3,), seconds=1.0),
)
BUFFERS = (Buffer("a", 4, 0), Buffer("b", 3, 1), Buffer("c", 2, 2), Buffer("d", 1, 3), Buffer("tangent", 1, None))
PROGRAM = Program("p", OPS, BUFFERS, 3, forward_outputs=(1,), gradients=(3,))
LEGAL: list[Action] = [Compute(0), Compute(1), Free(0), Compute(2), Boundary(), Compute(3), Free(2)]


def clauses(actions: list[Action]) -> list[int]:
    return [violation.clause for violation in check(PROGRAM, Schedule(tuple(actions)))]


def test_a_legal_schedule_has_no_violation():
    assert clauses(LEGAL) == []


@pytest.mark.parametrize(
    ("clause", "actions"),
    [
        (1, [Compute(0), Free(0), Compute(1), Compute(2), Boundary(), Compute(3)]),
        (1, [*LEGAL, Compute(9)]),
        (2, LEGAL[:4] + LEGAL[5:]),
        (2, [*LEGAL, Boundary()]),
        (2, [*LEGAL[:3], Boundary(), Compute(3)]),
        (2, LEGAL[:-2]),
        (3, [*LEGAL[:2], Compute(1), *LEGAL[2:]]),
        (3, [*LEGAL[:5], Compute(2), *LEGAL[5:]]),
        (4, [*LEGAL, Free(0)]),
        (4, [*LEGAL, Offload(0, "host")]),
        (4, [*LEGAL, Reload(0)]),
        (5, [*LEGAL, Free(3)]),
    ],
)
def test_a_broken_clause_is_named(clause: int, actions: list[Action]):
    assert clause in clauses(actions)


def test_the_budget_is_clause_six():
    schedule = Schedule(tuple(LEGAL))
    assert check(PROGRAM, schedule, 7) == []
    (violation,) = check(PROGRAM, schedule, 6)
    assert violation.clause == 6
    assert "7 bytes" in str(violation)
