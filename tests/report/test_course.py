"""Moments and stays are the simulator's bytes: held against what another module says is live at each moment."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from plans import LINKED, hybrid, recomputed

from ebbtide.report.records.course import Course, course_of
from ebbtide.report.records.decisions import Decision
from ebbtide.report.records.page import page_of
from ebbtide.step.occupancy import moment_at
from ebbtide.step.program import Program
from ebbtide.step.schedule import Compute, Free, Schedule
from ebbtide.step.simulate import simulate
from random_moves import random_links, random_moves
from random_schedule import random_schedule
from strategies import examples, programs


def there(course: Course, moment: int) -> set[int]:
    return {stay.buffer for stay in course.stays if stay.first <= moment <= stay.last}


def assert_true(program: Program, schedule: Schedule, course: Course) -> None:
    actions = [i for i, action in enumerate(schedule.actions) if not isinstance(action, Free)]
    assert [each.action for each in course.moments] == [schedule.actions[i] for i in actions]
    for index, (action, moment) in enumerate(zip(actions, course.moments, strict=True)):
        live = moment_at(program, schedule, action)
        assert live.bytes(program) == moment.bytes
        assert there(course, index) == set(live.buffers)
        rest = live.workspace_bytes + live.copy_bytes + live.state_bytes + live.user_bytes
        assert sum(program.buffers[b].bytes for b in live.buffers) + rest == moment.bytes


@settings(max_examples=examples(100))
@given(st.data())
def test_what_is_there_is_what_is_live(data: st.DataObject) -> None:
    program = data.draw(programs())
    seed = data.draw(st.integers(0, 2**31 - 1))
    if data.draw(st.booleans()):
        links = random_links(random.Random(seed))
        machine, schedule = replace(LINKED, links=links), random_moves(program, links, seed)
    else:
        machine, schedule = LINKED, random_schedule(program, seed, 0.2)
    assert_true(program, schedule, course_of(program, schedule, simulate(program, schedule, machine)))


def test_what_is_there_while_buffers_move() -> None:
    plan = hybrid(6)
    assert plan.schedule.moves
    course = course_of(plan.program, plan.schedule, plan.timeline)
    assert_true(plan.program, plan.schedule, course)
    assert {stay.reloaded for stay in course.stays if stay.later} == {True}
    assert {each.lane for each in course.moments} == {"compute", "host out", "host in"}
    assert course.moments[course.peak].bytes == plan.timeline.above_bytes


def test_waits_are_all_told() -> None:
    plan = hybrid(6)
    course = course_of(plan.program, plan.schedule, plan.timeline)
    assert sum(each.wait_seconds for each in course.moments) <= plan.timeline.waited_seconds
    assert course.wait_seconds == plan.timeline.waited_seconds > 0


def test_decisions_are_those_of_the_schedule() -> None:
    for plan, decision in ((recomputed(8), Decision.RECOMPUTED), (hybrid(8), Decision.MOVED)):
        data = page_of(plan).to_json()
        words = data["decisions"]
        of = {plan.program.buffers[b].name: words[d] for b, d in enumerate(data["buffers"]["decision"])}
        name = "gelu" if decision is Decision.RECOMPUTED else "linear"
        chosen = {f"{name}{layer}" for layer in range(0, 7, 2)}
        assert {buffer for buffer, told in of.items() if told == decision.value} == chosen
        assert of["gelu1"] == "kept"
        assert of["weight3"] == of["tangent"] == "held"
        assert of["flow3"] == "temporary"
    runs = recomputed(8).timeline.runs
    assert sum(isinstance(action, Compute) for action in recomputed(8).schedule.actions) == int(runs.sum())
