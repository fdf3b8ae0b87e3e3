"""What a plan says of what it moves."""

from __future__ import annotations

from dataclasses import replace

from test_move_rules import MACHINE, MOVED, PROGRAM

from ebbtide.report.plan import Plan
from ebbtide.report.text.plan import moves_of
from ebbtide.step.schedule import Schedule
from ebbtide.step.status import Status
from ebbtide.step.unplanned import unplanned_schedule

PLAN = Plan(
    program=PROGRAM,
    schedule=Schedule(tuple(MOVED)),
    status=Status.FEASIBLE,
    case="p",
    planner="auto",
    budget_bytes=100,
    resident_bytes=0,
    reserve_bytes=0,
    floor_bytes=1,
    floor_op=0,
    smallest_bytes=10,
    bound=None,
    bound_class="",
    plan_seconds=0.0,
    machine=MACHINE,
    tiers=("host",),
)


def test_the_text_tells_what_moves_what_it_takes_and_what_is_hidden() -> None:
    assert moves_of(PLAN) == [
        "4 B to the host in 1 buffer, 4 B back in 1 reload",
        "4.00 s of transfers predicted, 4.00 s waited for, 0.00 % hidden",
    ]
    assert all(line in PLAN.report() for line in moves_of(PLAN))
    kept = replace(PLAN, schedule=unplanned_schedule(PROGRAM))
    assert moves_of(kept) == ["nothing to host"]
    assert moves_of(replace(kept, tiers=())) == []


def test_a_tensor_that_is_moved_is_explained() -> None:
    text = PLAN.explain("a")
    assert "moved to the host and back once: after b for d" in text
    assert "4.00 s of transfers, 4.00 s of which ops wait for" in text
    assert "made again" not in text
