"""Where figures come from: what a result says of the runs that made it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import ebbtide
from harness import origin
from harness.origin import Origin, cases_of_this_version, seeds_of, version_now
from harness.record import Record, Row

QUESTIONS = [path.stem for path in sorted(origin.BENCHMARKS.glob("*.py"))]


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_benchmark_names_its_seeds(name: str) -> None:
    assert seeds_of(name)


def test_the_version_is_that_of_the_library() -> None:
    assert version_now() == ebbtide.__version__


def _record(cases: list[str], commit: str, version: str) -> Record:
    record = Record("planners", {"q": "Q"}, {}, {"date": "2026-01-01"})
    record._start = Origin(commit, False, version, {"date": "2026-01-01"})
    for case in cases:
        record.rows.append(Row("q", {"case": case}))
        record.case_seconds[f"q:{case}"] = 1.0
    return record


def test_a_case_keeps_the_origin_of_the_run_that_gave_it(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    _record(["a", "b"], "1111", "0.0.9").write(path)
    again = _record(["b", "c"], "2222", version_now())
    joined = Record.read(path)
    joined.take(again)
    joined.write(path)
    known = Record.read(path)
    assert {each.commit: each.cases for each in known.origins} == {"1111": ("q:a",), "2222": ("q:b", "q:c")}
    assert cases_of_this_version(path) == {"q:b", "q:c"}
    assert cases_of_this_version(tmp_path / "none.json") == set()
    assert "## Q" in known.markdown()


def test_a_result_of_changed_sources_is_of_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "_checked_out", lambda: ("1111", False))
    assert Origin("1111", False, "1").is_of_this_commit
    assert not Origin("1111", True, "1").is_of_this_commit
    assert not Origin("2222", False, "1").is_of_this_commit
    monkeypatch.setattr(origin, "_checked_out", lambda: ("1111", True))
    assert not Origin("1111", False, "1").is_of_this_commit


def test_no_git_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an unpacked source archive there is none, or one that knows nothing of it."""

    def missing(*args: object, **kwargs: object) -> object:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    without = origin.origin_now("planners", {})
    assert (without.commit, without.version, without.is_of_this_commit) == ("", version_now(), False)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=128, stdout="", stderr="fatal"))
    assert origin.origin_now("planners", {}).commit == ""
