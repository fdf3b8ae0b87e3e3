"""What a move means: legality clause by clause, bytes in tiers, the clock against one written from its definition."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.step.legality import check
from ebbtide.step.machine import Link, Machine
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Action, Boundary, Compute, Free, Hold, Offload, Reload, Schedule
from ebbtide.step.simulate import overhead_of, simulate
from ebbtide.step.unplanned import unplanned_schedule
from strategies import examples, programs

HOST = Link("host", 100, 2.0, 4.0, latency_seconds=0.5, least_bytes=2)
DISK = Link("disk", 100, 1.0, 2.0, duplex=False, compute_share=0.25, alignment_bytes=8)
MACHINE = Machine("m", "cuda", 1000, {"float32": 1.0}, 1.0, 0.0, 1, {"host": HOST, "disk": DISK})
OPS = (
    Op("a", "t", (), (0,), seconds=1.0),
    Op("b", "t", (0,), (1, 2), seconds=1.0),
    Op("c", "t", (1,), (3,), seconds=1.0),
    Op("d", "t", (0, 3, 5), (4,), seconds=1.0),
    Op("e", "t", (0, 4), (6,), seconds=1.0),
)
BUFFERS = (
    Buffer("a", 4, 0),
    Buffer("b", 3, 1),
    Buffer("small", 1, 1),
    Buffer("c", 2, 2),
    Buffer("d", 2, 3),
    Buffer("tangent", 2, None),
    Buffer("e", 2, 4),
)
PROGRAM = Program("p", OPS, BUFFERS, 3, forward_outputs=(3,), gradients=(6,))
AWAY: list[Action] = [Compute(0), Compute(1), Offload(0, "host"), Free(0), Compute(2), Boundary(), Reload(0)]
MOVED: list[Action] = [*AWAY, Compute(3), Compute(4), Free(0), Free(1), Free(4)]


def clauses(actions: list[Action], program: Program = PROGRAM) -> list[int]:
    return [each.clause for each in check(program, Schedule(tuple(actions)), links=MACHINE.links)]


def test_a_buffer_may_leave_once_and_come_back_any_number_of_times():
    assert clauses(MOVED) == []
    twice: list[Action] = [*AWAY, Compute(3), Free(0), Reload(0), Compute(4), Free(0), Free(1), Free(4)]
    assert clauses(twice) == []


@pytest.mark.parametrize(
    ("clause", "actions"),
    [
        pytest.param(4, [*MOVED[:2], Offload(0, "moon"), *MOVED[3:]], id="unknown tier"),
        pytest.param(4, [*MOVED[:3], Offload(0, "host"), *MOVED[3:]], id="second offload"),
        pytest.param(4, [*MOVED[:3], Offload(0, "disk"), *MOVED[3:]], id="two tiers"),
        pytest.param(4, [*MOVED[:3], Reload(0), *MOVED[3:]], id="reload of what is resident"),
        pytest.param(4, [*MOVED[:3], *MOVED[4:]], id="reload of what was not freed"),
        pytest.param(4, [*MOVED[:4], Reload(0), Free(0), *MOVED[4:]], id="reloaded and not read"),
        pytest.param(4, [*MOVED, Reload(0)], id="reloaded and not read before the end"),
        pytest.param(4, [*MOVED[:2], Offload(2, "host"), *MOVED[2:]], id="too small for the tier"),
        pytest.param(4, [*MOVED[:5], Offload(3, "disk"), *MOVED[5:]], id="an output"),
        pytest.param(4, [*MOVED[:6], Offload(5, "disk"), *MOVED[6:]], id="a tangent"),
        pytest.param(1, [*MOVED[:6], *MOVED[7:]], id="read while it is away"),
    ],
)
def test_what_is_no_move_is_refused_by_its_clause(clause: int, actions: list[Action]):
    assert clause in clauses(actions)


def test_what_is_not_the_whole_of_its_storage_and_what_the_step_changes_stay():
    part = replace(PROGRAM, buffers=(replace(BUFFERS[0], whole=False), *BUFFERS[1:]))
    assert 4 in clauses(MOVED, part)
    changed = replace(PROGRAM, mutations=(2,))
    assert 4 in clauses([*MOVED[:2], Offload(2, "disk"), *MOVED[2:]], changed)
    assert Program.from_json(part.to_json()) == part


def test_a_tier_holds_every_copy_until_the_step_ends_and_its_capacity_is_a_budget():
    moved = Schedule((*MOVED[:3], Offload(1, "host"), *MOVED[3:]))
    assert simulate(PROGRAM, moved, MACHINE).tier_bytes["host"].tolist() == [0, 0, 4, *[7] * (len(moved.actions) - 3)]
    full = replace(HOST, capacity_bytes=6)
    (violation,) = check(PROGRAM, moved, links={"host": full})
    assert violation.clause == 7
    assert "7 bytes are in tier 'host' at the end, which holds 6" in violation.message
    aligned = Schedule(tuple(Offload(0, "disk") if each == Offload(0, "host") else each for each in MOVED))
    assert int(simulate(PROGRAM, aligned, MACHINE).tier_bytes["disk"].max()) == 8


def test_only_the_first_free_waits_for_the_copy_and_only_a_reader_for_the_way_back():
    """4 B take 2.5 s out and 1.5 s in; the copy starts at 2 s."""
    actions = [*AWAY, Compute(3), Free(0), Reload(0), Compute(4), Free(0), Free(1), Free(4)]
    timeline = simulate(PROGRAM, Schedule(tuple(actions)), MACHINE)
    waits = {i: w for i, w in enumerate(timeline.wait_seconds.tolist()) if w}
    assert waits == {3: 2.5, 7: 1.5, 10: 1.5}  # the first free, and each read of what comes back
    assert timeline.seconds == 5.0 + 2.5 + 1.5 + 1.5
    assert timeline.transfer_seconds == 2.5 + 1.5 + 1.5
    assert timeline.hidden_share == 0.0
    assert [timeline.lanes[i] for i in (0, 2, 6)] == ["compute", "host out", "host in"]
    assert overhead_of(PROGRAM, Schedule(tuple(actions)), MACHINE) == timeline.seconds / 5.0 - 1.0


def test_the_boundary_waits_for_what_is_being_reloaded():
    actions = [*AWAY[:5], Reload(0), Boundary(), *MOVED[7:]]
    timeline = simulate(PROGRAM, Schedule(tuple(actions)), MACHINE)
    assert timeline.wait_seconds[6] == 1.5
    assert timeline.wait_seconds[7] == 0.0


def test_the_canonical_schedule_of_steps_frees_after_the_last_use():
    steps = [Compute(0), Compute(1), Offload(0, "host"), Compute(2), Hold(0), Boundary(), Reload(0), *MOVED[7:9]]
    actions = Schedule.from_steps(PROGRAM, steps).actions
    assert actions.index(Free(0)) == actions.index(Boundary()) - 1  # held up to here
    assert clauses(list(actions)) == []
    order = [op for op in unplanned_schedule(PROGRAM).computes]
    same = Schedule.from_steps(PROGRAM, [Boundary() if op is None else Compute(op) for op in order])
    assert same == unplanned_schedule(PROGRAM)


def moved_at_random(program: Program, random: Random) -> Schedule:
    """Some buffers away in some of their gaps, reruns among it: legal."""
    steps: list[object] = [Boundary() if op is None else Compute(op) for op in unplanned_schedule(program).computes]
    for b in random.sample(sorted(program.movable), len(program.movable)):
        link = random.choice(["host", "disk"])
        known = list(steps)
        out = random.randrange(len(known) + 1)
        known.insert(out, Offload(b, link))
        for _ in range(random.choice([1, 1, 2])):
            known.insert(random.randrange(out + 1, len(known) + 1), Reload(b))
        if random.random() < 0.3:
            known.insert(random.randrange(out + 1, len(known) + 1), Hold(b))
        schedule = Schedule.from_steps(program, known)  # type: ignore[arg-type]
        if not check(program, schedule, links=LOOSE.links):
            steps = known
    return Schedule.from_steps(program, steps)  # type: ignore[arg-type]


LOOSE = replace(MACHINE, links={"host": replace(HOST, least_bytes=0), "disk": DISK})


def seconds_by_definition(program: Program, schedule: Schedule, machine: Machine) -> float:
    """When the last action ends: every action starts at the latest of what it needs, found by going over all others."""
    actions = schedule.actions
    starts: list[float] = []
    ends: list[float] = []
    stolen: list[float] = []
    tier = {a.buffer: a.tier for a in actions if isinstance(a, Offload)}
    for i, action in enumerate(actions):
        computing = [k for k in range(i) if not isinstance(actions[k], Offload | Reload)]
        last = computing[-1] if computing else -1
        now = (ends[last] if computing else 0.0) + sum(stolen[k] for k in range(last + 1, i))
        needs = [now]
        taken = share = 0.0
        reloads = {k: a.buffer for k, a in enumerate(actions[:i]) if isinstance(a, Reload)}
        match action:
            case Compute(op):
                taken = program.ops[op].seconds
                needs += [ends[k] for k, b in reloads.items() if b in program.ops[op].inputs]
            case Boundary():
                needs += [ends[k] for k in reloads]
            case Free(b):
                needs += [ends[k] for k in range(i) if actions[k] == Offload(b, tier.get(b, ""))]
            case Offload(b, _) | Reload(b):
                link = machine.links[tier[b]]
                way = "out" if isinstance(action, Offload) else "in"
                taken, share = link.seconds(program.buffers[b].bytes, way), link.compute_share
                for k in range(i):
                    other = actions[k]
                    if isinstance(other, Offload | Reload) and tier[other.buffer] == tier[b]:
                        if not link.duplex or type(other) is type(action) or other == Offload(b, tier[b]):
                            needs.append(ends[k])
        starts.append(max(needs))
        ends.append(starts[-1] + taken)
        stolen.append(taken * share)
    return max(ends, default=0.0)


@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_the_clock_is_that_of_the_definition(data: st.DataObject, random: Random):
    program: Program = data.draw(programs())
    schedule = moved_at_random(program, random)
    timeline = simulate(program, schedule, LOOSE)
    assert abs(timeline.seconds - seconds_by_definition(program, schedule, LOOSE)) < 1e-9
    peak = timeline.above_bytes
    assert not check(program, schedule, peak)
    if peak:
        assert [each.clause for each in check(program, schedule, peak - 1)] == [6]


def test_random_schedules_do_move():
    moved = 0
    for seed in range(examples(50)):
        moved += moved_at_random(PROGRAM, Random(seed)).moves
    assert moved > examples(50) // 4
