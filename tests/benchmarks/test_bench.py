"""``make bench``: a real case of every benchmark, in under an hour; and what it says of figures that are committed."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from harness import bench, checked, origin
from harness.bench import SELECTION
from harness.checked import compared, counted
from harness.origin import Origin

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


def test_a_sample_of_this_commit_is_not_run_again_and_one_of_another_runs_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "BENCH", tmp_path)
    monkeypatch.setattr(origin, "_checked_out", lambda: ("1111", False))
    [whole] = [each for each in SELECTION if each.name == "promises"]
    [resumed] = [each for each in SELECTION if each.name == "planners"]
    assert bench._selected(whole) is not None
    for each in (whole, resumed):
        data = {"origins": [Origin("1111", False, "1", cases=("some case",)).to_json()]}
        (tmp_path / f"{each.name}.json").write_text(json.dumps(data), encoding="utf-8")
    assert bench._selected(whole) is None
    assert "--resume" in (bench._selected(resumed) or [])
    assert (tmp_path / "planners.json").exists()
    monkeypatch.setattr(origin, "_checked_out", lambda: ("2222", False))
    assert bench._selected(whole) is not None
    assert bench._selected(resumed) is not None
    assert not list(tmp_path.glob("*.json")), "what is of another commit is not gone on with"


def _row(case: str, **columns: object) -> dict[str, object]:
    return {"question": "q", "columns": {"case": case, **columns}, "checks": []}


def test_bytes_and_counts_are_compared_and_seconds_are_not() -> None:
    ours = [_row("a", peak_bytes=10, seconds=1.0, ok=True), _row("b", peak_bytes=7), _row("new", peak_bytes=1)]
    theirs = [_row("a", peak_bytes=10, seconds=2.0, ok=True), _row("b", peak_bytes=8)]
    assert counted(ours, theirs) == (2, 1)


CHECK = {"what": "peak", "value": 3, "target": 2, "relation": "<=", "passed": False}
MADE = Origin("c0ffee1234", False, "1", {"date": "2026-01-02"}, cases=("q:a",)).to_json()


def _sample(passed: bool, failures: list[dict[str, str]]) -> dict[str, object]:
    rows = [{**_row("a", peak_bytes=10), "checks": [{**CHECK, "passed": passed}, {**CHECK, "what": "bits"}]}]
    return {"rows": rows, "origins": [MADE], "failures": failures}


def test_a_sample_contradicts_what_the_result_met_and_no_more() -> None:
    sample = _sample(False, [{"case": "q:b", "error": "E"}])
    committed = _sample(True, [])
    one = compared("planners", sample, committed)
    assert one.targets == 2
    assert one.missed == ("q, a: peak 3, not <= 2", "q, a: bits 3, not <= 2")
    assert one.contradicted == ("q, a: peak 3, not <= 2", "q:b failed: E")
    assert one.held == ""
    same = compared("planners", sample, sample)
    assert (same.contradicted, same.same, same.other) == ((), 1, 0)
    assert same.held == "2026-01-02 at c0ffee1"


def test_what_was_found_is_kept_with_when_it_last_held(tmp_path: Path) -> None:
    path = tmp_path / "checked.json"
    held = compared("planners", _sample(True, []), _sample(True, []))
    checked.write([held], path)
    assert checked.read(path) == [held]
    checked.write([compared("planners", _sample(False, []), _sample(True, []))], path)
    [again] = checked.read(path)
    assert again.contradicted
    assert again.held == held.held
