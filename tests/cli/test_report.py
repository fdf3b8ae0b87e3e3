"""``ebbtide report`` and ``ebbtide show``: from a plan file to a page or to text, or a refusal that says what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ebbtide.cli import app
from ebbtide.report.plan import Plan
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.provenance import Provenance
from ebbtide.step.status import Status
from ebbtide.step.unplanned import unplanned_schedule

OPS = 12


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def a_plan(ops: int = OPS, budget_bytes: int = 2**30) -> Plan:
    """A chain of ``ops`` in captured order."""
    program = Program(
        "chain",
        tuple(
            Op(f"op{i}", "aten.mm", (i - 1,) if i else (), (i,), seconds=1e-3, module=f"layers.{i}", source="m.py:3")
            for i in range(ops)
        ),
        tuple(Buffer(f"b{i}", 2**20, i) for i in range(ops)),
        ops // 2,
    )
    return Plan(
        program=program,
        schedule=unplanned_schedule(program),
        status=Status.OPTIMAL,
        case="chain",
        planner="hand",
        budget_bytes=budget_bytes,
        resident_bytes=0,
        reserve_bytes=0,
        floor_bytes=2**21,
        floor_op=1,
        smallest_bytes=2**21,
        bound=0.0,
        bound_class="order: program",
        plan_seconds=0.1,
        provenance=Provenance(device="cpu", torch="x"),
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return a_plan().save(tmp_path / "plan.json")


def test_a_saved_plan_becomes_a_page(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    result = run("report", saved, "--out", out, "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told == {"case": "chain", "out": str(out), "bytes": out.stat().st_size, "ops": OPS, "tensors": OPS}
    assert "<title>chain</title>" in out.read_text(encoding="utf-8")


def test_several_plans_share_a_frontier(saved: Path, tmp_path: Path) -> None:
    other = a_plan(budget_bytes=2**31).save(tmp_path / "other.json")
    result = run("report", saved, other, "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.stderr
    assert f'"budget_bytes":{2**31}' in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_plans_of_different_steps_share_none(saved: Path, tmp_path: Path) -> None:
    other = a_plan(ops=3).save(tmp_path / "other.json")
    (tmp_path / "other.json").write_text(other.read_text().replace('"case":"chain"', '"case":"another"'))
    result = run("report", saved, other, "--out", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "different steps" in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_a_saved_plan_is_printed(saved: Path) -> None:
    result = run("show", saved)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{a_plan()}\n{a_plan().details}")
    assert Status.OPTIMAL.value in result.stdout
    assert json.loads(run("show", saved, "--json").stdout) == json.loads(json.dumps(a_plan().summary()))
    assert run("show", saved, "--explain", "layers.3").stdout == f"{a_plan().explain('layers.3')}\n"


def test_one_tensor_of_a_saved_plan_is_explained_or_what_comes_close(saved: Path) -> None:
    result = run("show", saved, "--explain", "layer.3")
    assert result.exit_code == 2
    assert "'layers.3'" in result.stderr


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """A damage done to what a plan file holds."""

    def damage(path: Path) -> None:
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "older schema": (changed(lambda data: data.update(schema="ebbtide-plan/0")), "make it anew"),
    "newer schema": (changed(lambda data: data.update(schema="ebbtide-plan/99")), "make it anew"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:500]), "not a whole plan file"),
    "empty": (lambda path: path.write_text(""), "not a whole plan file"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not a whole plan file"),
    "a graph": (lambda path: path.write_text('{"nodes": [], "links": []}'), "is not a plan file"),
    "no peak": (changed(lambda data: data.pop("predicted_peak_bytes")), "damaged"),
    "another peak": (changed(lambda data: data.update(predicted_peak_bytes=1)), "says a peak of 1 bytes"),
    "illegal": (changed(lambda data: data["schedule"].pop(0)), "illegal schedule"),
    "negative": (changed(lambda data: data["program"]["buffers"][0].__setitem__(1, -1)), "damaged"),
    "gone": (lambda path: path.unlink(), "there is no file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is a folder"),
}


@pytest.mark.parametrize("command", ["report", "show"])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_refused_in_a_line(name: str, command: str, saved: Path, tmp_path: Path) -> None:
    damage, words = DAMAGES[name]
    damage(saved)
    out = tmp_path / "page.html"
    result = run(command, saved, *(["--out", out] if command == "report" else []))
    assert result.exit_code == 2
    assert words in result.stderr
    assert str(saved) in result.stderr
    assert "Traceback" not in result.stderr
    assert not out.exists()


def test_a_page_that_cannot_be_written_is_refused_first(saved: Path, tmp_path: Path) -> None:
    saved.write_text("damaged")
    result = run("report", saved, "--out", tmp_path / "nowhere" / "page.html")
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr


@pytest.mark.slow
def test_a_plan_of_50_000_ops_has_a_page(tmp_path: Path) -> None:
    plan = a_plan(50_000).save(tmp_path / "plan.json")
    result = run("report", plan, "--out", tmp_path / "page.html", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["ops"] == 50_000


def test_planning_writes_a_report_beside_the_plan(tmp_path: Path) -> None:
    graph = tmp_path / "graph.json"
    nodes = [{"id": i, "cost_cpu": 1.0, "cost_ram": 100.0, "backward": i > 2} for i in range(6)]
    links = [{"source": i, "target": i + 1} for i in range(5)] + [{"source": 0, "target": 5}]
    graph.write_text(json.dumps({"graph": {"name": "small"}, "nodes": nodes, "links": links}))
    page = tmp_path / "page.html"
    result = run("plan", graph, "--budget", "100%", "--report", page)
    assert result.exit_code == 0, result.stderr
    assert "<title>small</title>" in page.read_text(encoding="utf-8")
    page.unlink()
    plot = [] if find_spec("matplotlib") is None else ["--plot", tmp_path / "frontier.png"]
    result = run("compare", graph, "--budgets", "100%,80%", "--planners", "auto,keep_all", "--report", page, *plot)
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "frontier.png").exists() == bool(plot)
    assert "ends with .png, .svg or .pdf" in run("compare", graph, "--plot", tmp_path / "frontier.txt").stderr
    html = page.read_text(encoding="utf-8")
    assert len(re.findall(r'"planner":"(?:auto|keep_all)","status"', html)) >= 2
    refused = run("plan", graph, "--budget", "100%", "--report", tmp_path)
    assert refused.exit_code == 2
    assert "--report" in refused.stderr
