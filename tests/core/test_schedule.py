"""Canonical schedules: freed as early as their order of runs allows, and the same after a trip through JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from ebbtide.step.legality import check
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Boundary, Compute, Free, Offload, Reload, Schedule
from ebbtide.step.unplanned import unplanned_schedule
from strategies import programs


@given(program=programs())
def test_json_round_trip(program: Program):
    schedule = unplanned_schedule(program)
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule
    assert not check(program, schedule)


def test_movement_survives_json_and_reads_well():
    schedule = Schedule((Compute(0), Offload(0, "host"), Free(0), Boundary(), Reload(0)))
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert str(schedule).splitlines() == ["compute 0", "offload b0 host", "free b0", "boundary", "reload b0"]


def test_a_row_that_is_no_action_is_refused():
    with pytest.raises(ValueError, match="is not an action"):
        Schedule.from_json([["x", 1]])


def test_an_order_has_exactly_one_boundary():
    program = Program("p", (Op("a", "t", (), (0,)),), (Buffer("a", 1, 0),), 1)
    with pytest.raises(ValueError, match="exactly one boundary"):
        Schedule.from_computes(program, [0])


def test_a_copy_dies_before_the_next_one_is_made():
    ops = (Op("a", "t", (), (0,)), Op("b", "t", (0,), (1,)), Op("c", "t", (0,), (2,)))
    program = Program("p", ops, (Buffer("a", 1, 0), Buffer("b", 1, 1), Buffer("c", 1, 2)), 3)
    assert str(Schedule.from_computes(program, [0, 1, 0, 2, None])).splitlines() == [
        "compute 0",
        "compute 1",
        "free b0",
        "compute 0",
        "compute 2",
        "free b0",
        "boundary",
    ]
