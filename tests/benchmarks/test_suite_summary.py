"""Rows over all cases of a question: made once the cases have rows, and anew when results are merged."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from harness import suite
from harness.record import Record, Row
from questions import echo_networks


def question() -> ModuleType:
    module = ModuleType("question")

    def summary(rows: Sequence[Row]) -> Iterator[Row]:
        yield Row("sums", {"case": "all", "sum": sum(row.columns["value"] for row in rows)})

    vars(module).update(TITLE="Sums", CASES=("a", "b"), QUICK=(), summary=summary)
    return module


def test_merging_makes_the_summary_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for case, value in (("a", 1), ("b", 2)):
        record = Record("sums", {"sums": "Sums"}, {"quick": False, "only": "all"})
        record.rows += [Row("sums", {"case": case, "value": value}), Row("sums", {"case": "all", "sum": value})]
        record.case_seconds[f"sums:{case}"] = 1.0
        record.write(tmp_path / f"{case}.json")
    out = tmp_path / "sums.json"
    files = [str(tmp_path / f"{case}.json") for case in "ab"]
    monkeypatch.setattr(sys, "argv", ["sums.py", "--out", str(out), "--merge", *files])
    assert suite.main("sums.py", "", {"sums": question()}, 1.0) == 0
    rows = [row["columns"] for row in json.loads(out.read_text())["rows"]]
    assert rows == [{"case": "a", "value": 1}, {"case": "b", "value": 2}, {"case": "all", "sum": 3}]


def row(case: str, ratio: float, possible: float | None) -> Row:
    return Row("networks", {"case": case, "method": "auto", "ratio": ratio, "no_plan_above": possible})


def test_a_mean_that_bounds_forbid_is_no_miss() -> None:
    rows = [row(case, 1.5, 1.8) for case in echo_networks.CASES]
    (found,) = echo_networks.summary(rows)
    assert found.passed
    assert found.columns["ratio"] == 1.5
    (found,) = echo_networks.summary([row(case, 1.5, None) for case in echo_networks.CASES])
    assert [check.passed for check in found.checks] == [False, False]
    assert not list(echo_networks.summary(rows[:2]))


def test_a_case_that_ran_again_loses_all_its_old_rows() -> None:
    """What was refused before, in one row, is measured now, in others."""
    before, after = (Record("sums", {"q": "Sums"}, {}) for _ in range(2))
    before.rows = [Row("q", {"case": "one", "method": "ours"}), Row("q", {"case": "two", "method": "ours"})]
    before.case_seconds = {"q:one": 1.0, "q:two": 1.0}
    after.rows = [Row("q", {"case": "one", "method": "ours 50%"})]
    after.case_seconds = {"q:one": 2.0}
    before.take(after)
    assert [(row.columns["case"], row.columns["method"]) for row in before.rows] == [
        ("two", "ours"),
        ("one", "ours 50%"),
    ]
