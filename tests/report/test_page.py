"""The page holds the plan's own numbers, names nothing outside of itself, and no name in a plan can break it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from plans import hybrid, plan_of, recomputed

from ebbtide.errors import UsageError
from ebbtide.report.html.page import write_page
from ebbtide.report.plan import Plan
from ebbtide.report.records.curve import Curve
from ebbtide.report.records.page import page_of
from ebbtide.report.records.points import Measured
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.rewrite import Rewrite, Rewritten
from ebbtide.step.schedule import Boundary, Compute, Free, Schedule
from ebbtide.step.unplanned import unplanned_schedule

MOST_BYTES = 5_000_000
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def html_of(plan: Plan, **more: Any) -> str:
    stream = StringIO()
    write_page(page_of(plan, **more), stream)
    return stream.getvalue()


def data_of(html: str) -> dict[str, Any]:
    """The data that a page embeds."""
    [text] = DATA.findall(html)
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("make", [recomputed, hybrid])
def test_the_data_are_the_plans(make: Callable[[int], Plan]) -> None:
    plan = make(9)
    data, program = data_of(html_of(plan)), plan.program
    texts = data["texts"]
    assert [texts[each] for each in data["ops"]["name"]] == [op.name for op in program.ops]
    assert [texts[each] for each in data["ops"]["source"]] == [op.source for op in program.ops]
    assert [texts[each] for each in data["ops"]["module"]] == [op.module for op in program.ops]
    assert data["buffers"]["bytes"] == [buffer.bytes for buffer in program.buffers]
    assert data["bytes"]["peak"] == plan.predicted_peak_bytes
    assert data["bytes"]["budget"] == plan.budget_bytes
    assert data["bytes"]["unplanned"] == plan.baseline_peak_bytes
    drawn = data["planned"]
    kept = [i for i, action in enumerate(plan.schedule.actions) if not isinstance(action, Free)]
    assert drawn["bytes"] == plan.timeline.peak_bytes[kept].tolist()
    assert drawn["end"] == pytest.approx(plan.timeline.end_seconds[kept].tolist(), rel=1e-6)
    computed = [target for kind, target in zip(drawn["kind"], drawn["target"], strict=True) if kind == "c"]
    assert computed == [action.op for action in plan.schedule.actions if isinstance(action, Compute)]
    assert plan.resident_bytes + max(data["unplanned"]["bytes"]) == plan.baseline_peak_bytes


def test_parts_of_the_floor_add_up() -> None:
    plan = recomputed(9)
    floor = data_of(html_of(plan))["floor"]
    assert sum(size for _, size, _ in floor["parts"]) == floor["above"]
    assert plan.resident_bytes + floor["above"] == plan.floor_bytes


def test_the_page_loads_nothing() -> None:
    html = DATA.sub("", html_of(hybrid(5)))
    outside = re.findall(r"""(?:src|href|url|import|fetch)\s*[=(]\s*["']?([^"'\s)>]*)""", html)
    assert [each for each in outside if not each.startswith(("#", "data:"))] == []
    assert "default-src 'none'" in html
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert "@@" not in html


WICKED = "</script><script>alert(1)</script><!-- @@DATA@@ \u2028 'quoted\" \\ &amp; 名前 🧮"


def test_no_name_breaks_the_page() -> None:
    plan = recomputed(3)
    ops = [replace(op, name=f"{WICKED}{i}", module=WICKED, source=WICKED) for i, op in enumerate(plan.program.ops)]
    buffers = [replace(buffer, name=WICKED) for buffer in plan.program.buffers]
    program = replace(plan.program, ops=tuple(ops), buffers=tuple(buffers), name=WICKED)
    html = html_of(replace(plan, program=program, case=WICKED, planner=WICKED))
    data = data_of(html)
    assert data["case"] == WICKED
    assert data["texts"][data["buffers"]["name"][0]] == WICKED
    tags = _Tags()
    tags.feed(html)
    plain = _Tags()
    plain.feed(html_of(plan))
    assert tags.found == plain.found
    assert tags.title == WICKED


class _Tags(HTMLParser):
    """What elements a page has, by count, and its title."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.title = ""
        self._last = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found[tag] += 1
        self._last = tag

    def handle_data(self, data: str) -> None:
        if self._last == "title" and not self.title:
            self.title = data


def test_a_large_plan_is_small_enough() -> None:
    plan = recomputed(2000)
    assert len(plan.program.ops) == 9999
    html = html_of(plan)
    assert len(html.encode()) < MOST_BYTES
    assert len(data_of(html)["ops"]["name"]) == 9999


# -- odd plans ------------------------------------------------------------------------------------------------


def of_ops(*ops: Op, buffers: tuple[Buffer, ...] = (), boundary: int = 0) -> Plan:
    program = Program("odd", ops, buffers, boundary)
    return plan_of(program, unplanned_schedule(program))


EMPTY = of_ops()
ONE_OP = of_ops(Op("a", "aten.mm", (), (0,), seconds=1.0), buffers=(Buffer("a", 100, 0),), boundary=1)
NO_SECONDS = of_ops(Op("a", "aten.mm", (), (0,)), buffers=(Buffer("a", 0, 0),), boundary=1)
HUGE = of_ops(Op("a", "aten.mm", (), (0,), seconds=1e99), buffers=(Buffer("a", 2**60, 0),), boundary=1)
REWRITTEN = replace(
    of_ops(Op("a", "ebbtide_rewrites.loss.default", (), (0,), seconds=1.0), buffers=(Buffer("a", 100, 0),), boundary=1),
    rewritten=Rewritten((Rewrite("linear-cross-entropy", "a", "m.py:1", "rows", (("rows", 8),)),), 0.5, 2**20),
)
INFEASIBLE = replace(recomputed(3), budget_bytes=1)
ODD = {
    "empty": EMPTY,
    "one op": ONE_OP,
    "no seconds": NO_SECONDS,
    "huge": HUGE,
    "rewritten": REWRITTEN,
    "above its budget": INFEASIBLE,
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_plan_has_a_page(name: str) -> None:
    data = data_of(html_of(ODD[name]))
    assert data["bytes"]["peak"] == ODD[name].predicted_peak_bytes
    moments = sum(not isinstance(action, Free) for action in ODD[name].schedule.actions)
    assert len(data["planned"]["bytes"]) == moments


def test_rewrites_are_told() -> None:
    html = html_of(REWRITTEN)
    data = data_of(html)
    assert data["decisions"][data["buffers"]["decision"][0]] == "rewritten"
    assert "linear-cross-entropy" in DATA.sub("", html)
    assert data["bytes"]["unplanned"] == REWRITTEN.resident_bytes + 2**20


def test_nothing_is_said_to_be_measured_that_was_not() -> None:
    plan = recomputed(3)
    told = "Nothing on this page was measured in a run"
    assert told in html_of(plan)
    measured = html_of(plan, measured=(Measured("planned", 2**20, 0.1),))
    assert told not in measured
    expected = {"label": "planned", "peak_bytes": 2**20, "overhead": 0.1, "curve": None}
    assert data_of(measured)["measured"] == [expected]
    curve = Curve((1, 3), (2, 1))
    found = data_of(html_of(plan, measured=(Measured("planned", 3, None, curve),)))["measured"][0]["curve"]
    assert found == {"forward": [1, 3], "backward": [2, 1]}


def test_what_is_resident_is_told_by_kind_where_the_kinds_add_up() -> None:
    plan = recomputed(3)
    parts = {"weights": plan.resident_bytes - 7, "arguments of the call": 7, "other": 0}
    known = replace(plan, resident_parts=parts)
    assert data_of(html_of(known))["resident_parts"] == [
        ["weights", plan.resident_bytes - 7],
        ["arguments of the call", 7],
    ]
    moved = replace(known, resident_bytes=plan.resident_bytes + 1)
    for other in (plan, moved):
        assert data_of(html_of(other))["resident_parts"] == [["resident before the step", other.resident_bytes]]


def test_the_frontier_has_all_plans_of_one_step() -> None:
    plan = recomputed(9)
    other = replace(plan, schedule=unplanned_schedule(plan.program), budget_bytes=2**40)
    data = data_of(html_of(plan, others=[other], runs=[(other, Measured("planned", 5, 0.2))]))
    points = data["points"]
    assert [(each["planner"], each["chosen"]) for each in points].count(("hand", True)) == 1
    assert [each["measured_peak_bytes"] for each in points if each["budget_bytes"] == 2**40] == [5]
    assert data["measured"] == []
    with pytest.raises(UsageError, match="different steps"):
        page_of(plan, [recomputed(8)])


def test_a_page_is_saved_from_a_plan_file(tmp_path: Path) -> None:
    plan = hybrid(5)
    again = Plan.load(plan.save(tmp_path / "plan.json"))
    again.save_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == html_of(plan)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "plan.json"]


def test_schedules_are_of_the_kinds_that_are_drawn() -> None:
    kinds = {type(action) for make in (recomputed, hybrid) for action in make(5).schedule.actions}
    assert {Compute, Free, Boundary} < kinds
    assert isinstance(recomputed(5).schedule, Schedule)
