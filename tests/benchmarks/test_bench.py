"""``make bench``: a real case of every benchmark, in under an hour; and what it says of figures that are committed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from harness import bench
from harness.bench import SELECTION, counted

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
