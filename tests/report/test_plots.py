"""Plots show the plan's numbers; without matplotlib the core works and says what to install."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from plans import hybrid, recomputed
from test_page import ODD
from typer.testing import CliRunner

import ebbtide
from ebbtide.cli import app
from ebbtide.errors import UsageError
from ebbtide.report.records.course import planned_course, unplanned_course
from ebbtide.report.records.page import page_of
from ebbtide.report.records.points import Measured
from ebbtide.report.records.stack import Category, stack_of
from ebbtide.step.unplanned import unplanned_schedule

matplotlib = pytest.importorskip("matplotlib", reason="needs the extra plot: matplotlib is not installed")
matplotlib.use("Agg")


def test_the_stack_adds_up() -> None:
    for plan in (recomputed(9), hybrid(9), *ODD.values()):
        for course in (planned_course(plan), unplanned_course(plan)):
            stack = stack_of(plan.program, course, plan.resident_bytes)
            assert list(stack) == list(Category)
            total = sum(stack.values())
            assert total.tolist() == [plan.resident_bytes + moment.bytes for moment in course.moments]
            assert min(int(each.min(initial=0)) for each in stack.values()) == 0


def test_a_plan_is_drawn_with_its_budget_and_its_peak() -> None:
    from matplotlib import pyplot

    plan = recomputed(9)
    figure = plan.plot()
    [ax] = figure.axes
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert {"recomputed", "end of the forward", "unplanned"} <= set(labels)
    assert any(label.startswith("budget ") for label in labels)
    tops = [float(patch.get_data().values.max()) for patch in ax.patches if hasattr(patch, "get_data")]
    assert plan.predicted_peak_bytes in tops
    assert plan.baseline_peak_bytes in tops
    pyplot.close(figure)


def test_it_draws_into_axes_that_are_there() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    ax = figure.subplots()
    assert recomputed(5).plot(ax=ax) is figure
    assert ebbtide.plot_frontier([recomputed(5)], ax) is figure
    with pytest.raises(UsageError, match="give matplotlib axes"):
        recomputed(5).plot(ax=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ODD)
def test_odd_plans_are_drawn(name: str) -> None:
    from matplotlib.figure import Figure

    for drawn in (ODD[name].plot(Figure().subplots()), ebbtide.plot_frontier([ODD[name]], Figure().subplots())):
        [ax] = drawn.axes
        assert ax.has_data()
        assert ax.get_xlabel()
        assert ax.get_ylabel()


def test_a_frontier_has_every_plan() -> None:
    from matplotlib.figure import Figure

    plan = recomputed(9)
    other = replace(plan, schedule=unplanned_schedule(plan.program), budget_bytes=2**40)
    figure = Figure()
    ebbtide.plot_frontier([plan, other], figure.subplots(), runs=[(plan, Measured("planned", 2**27, 0.2))])
    [ax] = figure.axes
    drawn = {(x, y) for line in ax.lines for x, y in zip(*line.get_data(), strict=True)}
    for each in (plan, other):
        assert (each.predicted_peak_bytes, 100 * each.overhead) in drawn
    assert (2**27, 20.0) in drawn
    with pytest.raises(UsageError, match="one plan or more"):
        ebbtide.plot_frontier([])
    with pytest.raises(UsageError, match="not of int"):
        ebbtide.plot_frontier([3])  # type: ignore[list-item]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "json", "pickle", "html"])
def test_the_name_of_the_file_says_what_is_written(suffix: str, tmp_path: Path) -> None:
    saved = recomputed(5).save(tmp_path / "plan.json")
    out = tmp_path / f"out.{suffix}"
    result = CliRunner().invoke(app, ["report", str(saved), "--out", str(out)])
    assert result.exit_code == 0, result.output
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF", "json": b'{"traceEvents"', "pickle": b"\x80\x04"}
    assert out.read_bytes().startswith(begins.get(suffix, b"<!doctype html>"))


def test_what_no_report_can_be_is_refused(tmp_path: Path) -> None:
    saved = recomputed(5).save(tmp_path / "plan.json")
    for out, words in ((tmp_path / "out.txt", "FILE.html"), (saved, "is a plan that is read")):
        result = CliRunner().invoke(app, ["report", str(saved), "--out", str(out)])
        assert result.exit_code == 2
        assert words in result.stderr
    assert page_of(ebbtide.Plan.load(saved))
    several = CliRunner().invoke(app, ["report", str(saved), str(saved), "--out", str(tmp_path / "out.pickle")])
    assert several.exit_code == 2
    assert "holds one plan" in several.stderr


def test_without_matplotlib_it_is_said_what_to_install(tmp_path: Path) -> None:
    saved = recomputed(5).save(tmp_path / "plan.json")
    script = (
        "import sys\nimport importlib.util as found\nfind = found.find_spec\n"
        "found.find_spec = lambda name, *more: None if name == 'matplotlib' else find(name, *more)\nimport ebbtide\n"
        f"plan = ebbtide.Plan.load({str(saved)!r})\n"
        "try:\n    plan.plot()\nexcept ebbtide.errors.UsageError as error:\n    print(error)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    told, torch = done.stdout.splitlines()
    assert "pip install matplotlib" in told
    assert torch == "False"
