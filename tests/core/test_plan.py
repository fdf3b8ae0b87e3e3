"""A plan is plain data: it survives its file bit for bit, and no file makes Ebbtide do anything but refuse it."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbtide.errors import EbbtideError, PlanFileError, PlanMismatch, UsageError
from ebbtide.report.plan import Plan
from ebbtide.step import legality
from ebbtide.step.machine import Link, Machine, machine_named
from ebbtide.step.occupancy import moment_at
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.provenance import Costs, Provenance
from ebbtide.step.schedule import Compute, Free, Offload, Reload, Schedule
from ebbtide.step.simulate import simulate
from ebbtide.step.status import Status
from ebbtide.step.unplanned import unplanned_schedule
from random_schedule import random_schedule
from strategies import chain, examples, programs

PROGRAM = Program(
    name="tiny",
    ops=(
        Op("a", "aten.mm", (), (0,), views=("input0",), workspace_bytes=8, seconds=1.0, source="m.py:1", module="one"),
        Op("d", "aten.drop", (0,), (1, 2), seconds=1.0, state_bytes=16),
        Op("b", "aten.gelu", (1,), (3,), seconds=2.0),
        Op("l", "aten.mean", (3,), (4,), seconds=1.0),
        Op("lb", "aten.mean_backward", (3, 5), (6,), seconds=1.0),
        Op("bb", "aten.gelu_backward", (1, 2, 6), (7,), seconds=2.0),
        Op("ab", "aten.mm", (0, 7), (8,), seconds=1.0),
    ),
    buffers=(
        Buffer("a", 100, 0),
        Buffer("d0", 100, 1),
        Buffer("d1", 50, 1),
        Buffer("b", 100, 2),
        Buffer("l", 4, 3),
        Buffer("t", 4, None),
        Buffer("lb", 100, 4),
        Buffer("bb", 100, 5),
        Buffer("ab", 40, 6),
    ),
    boundary=4,
    forward_outputs=(4,),
    gradients=(8,),
    resident_bytes=64,
    context={"device": "cpu"},
)


def a_plan(schedule: Schedule | None = None) -> Plan:
    return Plan(
        program=PROGRAM,
        schedule=schedule or Schedule.from_computes(PROGRAM, [0, 1, 2, 3, None, 0, 1, 2, 4, 5, 6]),
        status=Status.FEASIBLE,
        case="tiny",
        planner="hand",
        budget_bytes=600,
        resident_bytes=64,
        reserve_bytes=0,
        floor_bytes=400,
        floor_op=5,
        smallest_bytes=420,
        bound=0.1,
        bound_class="order: program, boundary: captured, tiers: none, costs: given",
        plan_seconds=0.5,
        provenance=Provenance(device="cpu", torch="x"),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return a_plan().save(tmp_path / "plan.json")


def test_a_plan_survives_its_file(path: Path) -> None:
    plan, again = a_plan(), Plan.load(path)
    assert again == plan
    assert again.summary() == plan.summary()
    assert str(again) == str(plan)
    assert again.program.fingerprint == plan.program.fingerprint


def test_saving_is_atomic(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def dies(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(OSError, match="disk full"):
        a_plan().save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path], "a draft is left"


def test_figures_derive_from_program_and_schedule() -> None:
    plan, unplanned = a_plan(), a_plan(unplanned_schedule(PROGRAM))
    assert unplanned.overhead == 0.0
    assert plan.overhead == pytest.approx(4 / 9)
    assert plan.gap == pytest.approx(4 / 9 - 0.1)
    assert plan.predicted_peak_bytes == 64 + simulate(PROGRAM, plan.schedule).above_bytes
    assert plan.baseline_peak_bytes == unplanned.predicted_peak_bytes


def test_the_text_form_is_stable() -> None:
    assert a_plan().details.splitlines()[:2] == ["plan for tiny by hand: FEASIBLE", "  budget     600 B"]
    assert "reruns     3 of 7 ops" in a_plan().details
    assert "pinned by bb (aten.gelu_backward)" in a_plan().details
    assert "rerun      1x b (aten.gelu): 2.00 s" in a_plan().report()


TEXT = """\
plan for tiny by hand: FEASIBLE
  budget     600 B
  peak       522 B predicted, 100.00 % of the unplanned 522 B
  resident   64 B, reserve 0 B
  counted    parameters, buffers, gradients, arguments; not optimizer state (none was given), what optimizer.step() \
takes while it runs
  overhead   44.44 % predicted (13.00 s against 9.00 s)
  bound      10.00 % (order: program, boundary: captured, tiers: none, costs: given), gap 34.44 %
  reruns     3 of 7 ops
  smallest   420 B, the least budget for which a plan was found
  floor      400 B of any budget with PyTorch's op order and boundary, pinned by bb (aten.gelu_backward)"""


def test_the_text_form_has_a_line_per_fact() -> None:
    assert a_plan().details == TEXT


# -- a value --------------------------------------------------------------------------------------------------


def test_what_a_debugger_shows_is_one_line() -> None:
    assert repr(a_plan()) == "<Plan of tiny by hand: peak 522 B of 600 B, overhead 44.44 %, FEASIBLE>"


def test_equal_plans_have_equal_hashes_and_others_differ() -> None:
    plan = a_plan()
    assert a_plan() == plan
    assert len({plan, a_plan(), replace(plan)}) == 1
    others = [
        a_plan(unplanned_schedule(PROGRAM)),
        replace(plan, case="other"),
        replace(plan, budget_bytes=601),
        replace(plan, resident_bytes=65),
        replace(plan, program=replace(PROGRAM, forward_outputs=(3, 4))),
    ]
    assert len({plan, *others}) == 1 + len(others)
    costly = replace(plan, program=PROGRAM.with_costs([3.0] * 7, [0] * 7))
    for other in (*others, costly, replace(plan, plan_seconds=1.0), replace(plan, machine=machine_named("cpu"))):
        assert other != plan
    assert plan != "plan"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_a_copy_is_the_same_plan(copied: Callable[[Plan], Plan], used: bool) -> None:
    plan = moving_plan() if used else a_plan()
    before = (plan.report(), plan.fingerprint) if used else None
    again = copied(plan)
    assert again == plan
    assert hash(again) == hash(plan)
    assert before is None or (again.report(), again.fingerprint) == before
    assert again.timeline.live_bytes.tolist() == plan.timeline.live_bytes.tolist()


def test_a_notebook_shows_a_table_and_no_markup_of_the_model() -> None:
    hostile = "<script>alert('1')</script>"
    plan = replace(a_plan(), case=hostile, planner=hostile, bound_class=hostile)
    text = plan._repr_html_()
    root = ElementTree.fromstring(text)
    svg = "{http://www.w3.org/2000/svg}"
    drawn = {f"{svg}{tag}" for tag in ("svg", "title", "polygon", "polyline", "path", "g", "text", "tspan")}
    assert {each.tag for each in root.iter()} == {"div", "table", "caption", "tbody", "tr", "th", "td", *drawn}
    told = root.find(f"{svg}svg/{svg}title")
    assert told is not None
    assert told.text == "memory over the step: 522 B planned, 522 B unplanned, budget 600 B"
    on_axes = [each.text or "" for each in root.iter(f"{svg}text")]
    assert on_axes[:3] == ["0 B", "256 B", "512 B"]
    assert all(each.endswith("s") for each in on_axes[3:-1])
    assert len(on_axes) > 5
    names = "budget peak resident counted overhead bound reruns smallest floor".split()
    assert [each.text for each in root.iter("th")] == names
    cells = [each.text or "" for each in root.iter("td")]
    assert cells[0] == "600 B"
    assert hostile in cells[names.index("bound")]
    caption = root.find("table/caption")
    assert caption is not None
    assert caption.text == f"{hostile} by {hostile}: FEASIBLE"


# -- a machine ------------------------------------------------------------------------------------------------

HOST = Machine("odd", "cuda", 2**20, {"float32": 1e9}, 1e9, 0.0, 1, {"host": Link("host", 2**30, 50.0, 25.0, 0.5)})


def moving_plan(machine: Machine | None = HOST) -> Plan:
    """Buffer a goes to the host after d and comes back right before the op that reads it."""
    actions = list(unplanned_schedule(PROGRAM).actions)
    out = actions.index(Compute(1)) + 1
    actions[out:out] = [Offload(0, "host"), Free(0)]
    actions.insert(actions.index(Compute(6)), Reload(0))
    return replace(a_plan(Schedule(tuple(actions))), machine=machine)


def test_a_plan_that_moves_buffers_is_simulated_on_its_machine() -> None:
    """100 B take 2 s out and 4 s in at these rates, and half a second each time before that."""
    plan = moving_plan()
    assert legality.check(plan.program, plan.schedule) == []
    ends: dict[object, float] = {}
    for action, end in zip(plan.schedule.actions, plan.timeline.end_seconds.tolist(), strict=True):
        ends.setdefault(action, end)
    assert ends[Offload(0, "host")] == 2.0 + 2.5
    assert ends[Free(0)] == 4.5
    assert ends[Reload(0)] == 4.5 + 2.0 + 1.0 + 1.0 + 2.0 + 4.5
    assert plan.step_seconds == 15.0 + 1.0
    assert plan.timeline.tier_bytes["host"].max() == 100
    assert plan.report()
    with pytest.raises(KeyError, match="no link to tier 'host'"):
        assert moving_plan(None).timeline


def test_a_plan_that_moves_buffers_survives_its_file(tmp_path: Path) -> None:
    plan = moving_plan()
    again = Plan.load(plan.save(tmp_path / "moving.json"))
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.machine == HOST
    assert again.step_seconds == plan.step_seconds


def test_a_file_that_moves_buffers_and_names_no_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="no link to tier 'host'"):
        load_data(tmp_path, {**moving_plan().to_json(), "machine": None})


EXPLAINED = """\
the plan has its peak at lb (aten.mean_backward)
a: 100 B, made by a (aten.mm) at m.py:1 in one
  read by    d (aten.drop), ab (aten.mm)
  unplanned  lives from op 0 to op 6 of 7
  plan       dropped and made again once: after d for d
  cost       1.00 s for 1 run of a
  at peak    live"""


@pytest.mark.parametrize("word", ["a", "one", "m.py:1", "m.py", "on"])
def test_a_buffer_is_explained_by_name_module_or_line(word: str) -> None:
    assert a_plan().explain(word) == EXPLAINED


@pytest.mark.parametrize(
    ("word", "lines"),
    [
        ("b", ["  cost       2.00 s for 1 run of b; 2.00 s for 2 runs before that: a, d"]),
        ("l", ["  plan       kept until the step ends", "  note       an output of the forward is held"]),
        ("t", ["t: 4 B, a tangent", "  unplanned  lives from the boundary to the end of the step"]),
        ("ab", ["  read by    no op", "  at peak    not live", "  note       a gradient exists at the end"]),
        ("d", ["d0: 100 B", "d1: 50 B", "  note       a rerun of d replays 16 B of generator state"]),
    ],
)
def test_an_explanation_says_what_the_plan_does_and_why(word: str, lines: list[str]) -> None:
    plan = a_plan(Schedule.from_computes(PROGRAM, [0, 1, 2, 3, None, 0, 1, 2, 4, 5, 6]))
    told = plan.explain(word).splitlines()
    for line in lines:
        assert any(each.startswith(line) for each in told), f"{line!r} is not in {told}"


def test_an_op_that_may_not_run_again_or_changes_an_input_is_explained() -> None:
    ops = list(PROGRAM.ops)
    ops[0] = replace(ops[0], rerunnable=False)
    ops[2] = replace(ops[2], reads_mutated=True)
    program = replace(PROGRAM, ops=tuple(ops), mutations=(), gradients=(8,))
    plan = replace(a_plan(), program=program, schedule=unplanned_schedule(program))
    assert "  note       a may not run again, so it is kept until its last reader" in plan.explain("a")
    assert "  note       b may not run after the boundary, which changes what it reads" in plan.explain("b")


def test_many_matches_show_the_largest_and_count_the_rest() -> None:
    program = chain(12)
    plan = replace(a_plan(), program=program, schedule=unplanned_schedule(program))
    text = plan.explain("gelu")
    assert text.count("made by") == 10
    assert text.splitlines()[-1].startswith("and 14 smaller ones, 112 B in all")


def test_an_unknown_buffer_is_refused_with_what_comes_close() -> None:
    program = chain(3)
    plan = replace(a_plan(), program=program, schedule=unplanned_schedule(program))
    with pytest.raises(UsageError, match=r"'gelu_1'.*'gelu1'"):
        plan.explain("gelu_1")
    with pytest.raises(UsageError, match="such as 'a'"):
        a_plan().explain("nothing of the kind")


@given(programs(), st.integers(0, 99))
def test_what_is_said_to_be_live_at_the_peak_is_what_is_live_there(program: Program, seed: int) -> None:
    schedule = random_schedule(program, seed, drop=0.3)
    plan = replace(a_plan(), program=program, schedule=schedule)
    moment = moment_at(program, schedule, plan.timeline.peak_action)
    for index, buffer in enumerate(program.buffers):
        text = plan.explain(buffer.name)
        assert ("  at peak    live" in text.splitlines()) == (index in moment.buffers)


# -- files ----------------------------------------------------------------------------------------------------


def load_data(tmp_path: Path, data: object) -> Plan:
    target = tmp_path / "mutated.json"
    target.write_text(json.dumps(data))
    return Plan.load(target)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="cannot be read"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanFileError, match="cannot be read"):
        Plan.load(tmp_path)


def test_every_truncation_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, 37):
        path.write_bytes(whole[:length])
        with pytest.raises(PlanFileError):
            Plan.load(path)


@given(st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_refused(tmp_path: Path, data: bytes) -> None:
    target = tmp_path / "random.json"
    target.write_bytes(data)
    with pytest.raises(PlanFileError):
        Plan.load(target)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema": ' * 50_000, "1" * 10_000, "NaN", '"text"', "null"])
def test_json_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    target = tmp_path / "odd.json"
    target.write_text(text)
    with pytest.raises(PlanFileError):
        Plan.load(target)


@pytest.mark.parametrize("schema", ["ebbtide-plan/0", "ebbtide-plan/2", "", None, 1, ["ebbtide-plan/1"]])
def test_another_schema_names_its_writer_and_the_way_out(tmp_path: Path, schema: object) -> None:
    with pytest.raises(PlanMismatch, match=r"written by ebbtide 0\.0\.9 .* make it anew with `ebbtide plan"):
        load_data(tmp_path, {**a_plan().to_json(), "schema": schema, "written_by": "ebbtide 0.0.9"})


def test_a_plan_file_of_the_former_name_is_not_read_and_stays(tmp_path: Path) -> None:
    data = {**a_plan().to_json(), "schema": "ebbflow-plan/4"}
    del data["written_by"]
    with pytest.raises(PlanMismatch, match=r"'ebbflow-plan/4'; .* make it anew"):
        load_data(tmp_path, data)
    assert list(tmp_path.iterdir())


def test_a_tampered_peak_is_refused(tmp_path: Path) -> None:
    data = a_plan().to_json()
    data["predicted_peak_bytes"] -= 1
    with pytest.raises(PlanFileError, match="peak"):
        load_data(tmp_path, data)


@pytest.mark.parametrize(
    "schedule",
    [
        [],
        [["b"]],
        [["c", 0], ["c", 1], ["c", 2], ["c", 3], ["c", 4], ["b"], ["c", 5], ["c", 6]],
        [["c", 0], ["f", 0], ["c", 1], ["c", 2], ["c", 3], ["b"], ["c", 4], ["c", 5], ["c", 6]],
        [["c", 99], ["b"]],
        [["c", -1], ["b"]],
        [["c", 10**30], ["b"]],
        [["x", 1]],
        [["c"]],
        ["c"],
        [None],
        {"a": 1},
        3,
    ],
)
def test_an_illegal_schedule_is_refused(tmp_path: Path, schedule: object) -> None:
    with pytest.raises(PlanFileError):
        load_data(tmp_path, {**a_plan().to_json(), "schedule": schedule})


def test_a_schedule_that_moves_buffers_is_refused_or_carried(tmp_path: Path) -> None:
    data = a_plan().to_json()
    position = data["schedule"].index(["b"])
    data["schedule"][position:position] = [["o", 0, "host"]]
    with pytest.raises(EbbtideError):
        load_data(tmp_path, data)


HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**30, -1, 2**63, 1e999, float("nan"), -0.0, 0.0, 1e308]),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.lists(st.integers(-2, 12), max_size=3),
)


def places(data: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every value inside ``data``."""
    found: list[tuple[Any, ...]] = []
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        found += [(*prefix, key), *places(value, (*prefix, key))]
    return found


def as_saved(plan: Plan) -> Any:
    return json.loads(json.dumps(plan.to_json()))


PROVEN = replace(a_plan(), provenance=Provenance(threads=2, costs=Costs.MEASURED, memory_bytes=4, notes={"a": "b"}))
DATA = [as_saved(PROVEN), as_saved(moving_plan())]
PLACES = [(which, place) for which, data in enumerate(DATA) for place in places(data)]


@given(st.sampled_from(PLACES), HOSTILE, st.booleans())
@settings(max_examples=examples(600), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mutation_is_refused_or_is_a_legal_plan(
    tmp_path: Path, at: tuple[int, tuple[Any, ...]], value: object, delete: bool
) -> None:
    which, place = at
    data = copy.deepcopy(DATA[which])
    holder = data
    for key in place[:-1]:
        holder = holder[key]
    if delete:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    try:
        plan = load_data(tmp_path, data)
    except EbbtideError:
        return
    assert legality.check(plan.program, plan.schedule) == []
    assert plan.predicted_peak_bytes == data["predicted_peak_bytes"]
    assert plan.report()
    assert repr(plan)
    assert plan._repr_html_()
    assert plan.fingerprint
    json.dumps(plan.to_json())
