"""``make bench``: a real case of every benchmark, in under an hour; and what it says of figures that are committed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from harness import bench, checked
from harness.bench import SELECTION
from harness.checked import compared, counted
from harness.origin import Origin
from publish import benchmarks_page

APART = {"gpu", "torch_versions"}
"""These have make targets of their own."""


def test_every_benchmark_is_in_it_and_an_hour_is_enough() -> None:
    assert {each.name for each in SELECTION} == {path.stem for path in bench.BENCHMARKS.glob("*.py")} - APART
    assert sum(each.minutes for each in SELECTION) < 60.0


@pytest.mark.parametrize("selection", SELECTION, ids=lambda each: each.name)
def test_every_selection_names_cases_that_there_are(selection: bench.Selection) -> None:
    module = importlib.import_module(selection.name)
    if hasattr(module, "TRAINERS"):
        known = [*module.CELLS, *module.TRAINERS]
    elif isinstance(module.QUESTIONS if hasattr(module, "QUESTIONS") else None, dict):
        known = [f"{name}:{case}" for name, question in module.QUESTIONS.items() for case in question.CASES]
    elif selection.name == "promises":
        known = [*module.GROUPS]
    elif selection.name == "opinfo":
        known = module.opinfo.names()
    elif selection.name == "soak":
        known = [f"soak:{case}" for case in module.soak.CASES]
    else:
        known = module.QUESTIONS
    for word in selection.only:
        assert any(word in each for each in known), f"{selection.name} has no {word}"


def test_a_selection_that_ran_with_todays_sources_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "BENCH", tmp_path)
    [whole] = [each for each in SELECTION if each.name == "promises"]
    assert bench._selected(whole) is not None
    monkeypatch.setattr(bench, "current_cases", lambda name, path: {"some case"})
    assert bench._selected(whole) is None


def _row(case: str, **columns: object) -> dict[str, object]:
    return {"question": "q", "columns": {"case": case, **columns}, "checks": []}


def test_bytes_and_counts_are_compared_and_seconds_are_not() -> None:
    ours = [_row("a", peak_bytes=10, seconds=1.0, ok=True), _row("b", peak_bytes=7), _row("new", peak_bytes=1)]
    theirs = [_row("a", peak_bytes=10, seconds=2.0, ok=True), _row("b", peak_bytes=8)]
    assert counted(ours, theirs) == (2, 1)


def test_what_was_found_is_kept_and_shown(tmp_path: Path) -> None:
    check = {"what": "peak", "value": 3, "target": 2, "relation": "<=", "passed": False}
    rows = [{**_row("a", peak_bytes=10), "checks": [check, {**check, "passed": True}]}]
    origins = [
        Origin("c0ffee1234", False, {"step": "old"}, {"date": "2026-01-02", "cpu": "x", "cores": 2}, cases=("q:a",))
    ]
    found = {"rows": rows, "origins": [each.to_json() for each in origins], "failures": [{"case": "q:b", "error": "E"}]}
    one = compared("planners", found, [_row("a", peak_bytes=11)])
    assert (one.targets, len(one.missed), one.same, one.other, one.is_current) == (2, 1, 0, 1, False)
    checked.write([one], tmp_path / "checked.json")
    assert checked.read(tmp_path / "checked.json") == [one]
    page = benchmarks_page.page([], [one])
    assert "| planners | 1 | 1 of 2; 1 cases failed | 0 | 1 | older |" in page
    assert "planners: q, a: peak 3, not <= 2" in page
    assert "2026-01-02 at c0ffee1" in page
    assert "Checked again" not in benchmarks_page.page([])
