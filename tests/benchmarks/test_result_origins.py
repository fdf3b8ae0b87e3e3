"""Where figures come from: what is hashed, what a result keeps of several runs, and what makes it stale."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from harness import origin
from harness.origin import Origin, declared, digest, module_hashes
from harness.record import Record, Row

BENCHMARKS = origin.BENCHMARKS
SOURCES = BENCHMARKS.parent / "src" / "ebbtide"
QUESTIONS = [path.stem for path in sorted(BENCHMARKS.glob("*.py"))]


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_benchmark_says_what_it_measures_and_from_which_seeds(name: str) -> None:
    parts, seeds = declared(name)
    assert parts
    assert seeds
    for part in parts:
        assert (SOURCES / part).is_dir() or (SOURCES / f"{part}.py").exists(), f"{name} measures no {part}"


def test_a_hash_is_of_code_alone() -> None:
    def of(text: str) -> str:
        return digest([("one.py", text.encode())])

    plain = 'x = "# no comment"\n\ndef f():\n    return 1\n'
    assert of(plain) == of(
        '"""Says what."""\n# why\nx = "# no comment"  # so\ndef f():\n    """It does."""\n\n    return 1\n'
    )
    assert of(plain) != of(plain.replace("no comment", "comment"))
    assert of(plain) != of(plain.replace("return 1", "return 2"))
    assert of(plain) != digest([("two.py", plain.encode())])
    assert of(plain) != digest([("one.py", plain.encode()), ("two.py", b"")])
    assert digest([]) == ""


def test_a_module_and_a_folder_are_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "program.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "step" / "machines.toml").write_text("y = 1\n", encoding="utf-8")
    (tmp_path / "units.py").write_text("z = 1\n", encoding="utf-8")
    monkeypatch.setattr(origin, "declared", lambda name: (("step", "units", "."), {}))
    before = module_hashes("any", tmp_path)
    (tmp_path / "step" / "machines.toml").write_text("y = 2\n", encoding="utf-8")
    after = module_hashes("any", tmp_path)
    assert before["step"] != after["step"]
    assert before["units"] == after["units"]
    assert before["."] != after["."]


def _record(cases: list[str], commit: str, hashes: dict[str, str]) -> Record:
    record = Record("planners", {"q": "Q"}, {}, {"date": "2026-01-01"})
    record._start = Origin(commit, False, hashes, {"date": "2026-01-01"})
    for case in cases:
        record.rows.append(Row("q", {"case": case}))
        record.case_seconds[f"q:{case}"] = 1.0
    return record


def test_a_case_keeps_the_origin_of_the_run_that_gave_it(tmp_path: Path) -> None:
    old = _record(["a", "b"], "1111", {"step": "s1"})
    old.write(tmp_path / "r.json")
    again = _record(["b", "c"], "2222", {"step": "s2"})
    joined = Record.read(tmp_path / "r.json", {"q": "Q"})
    joined.take(again)
    joined.write(tmp_path / "r.json")
    known = Record.read(tmp_path / "r.json", {"q": "Q"})
    assert {each.commit: each.cases for each in known.origins} == {"1111": ("q:a",), "2222": ("q:b", "q:c")}


def test_an_origin_tells_by_which_parts_it_is_stale() -> None:
    known = Origin("1111", False, {"step": "s1", "planners": "p1"})
    assert known.differing({"step": "s1", "planners": "p1"}) == ()
    assert known.differing({"step": "s1", "planners": "p2"}) == ("planners",)
    assert known.differing({"step": "s1", "cost": "c1"}) == ("cost",), "what was not recorded is stale"


def test_no_git_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an unpacked source archive there is none, or one that knows nothing of it."""

    def missing(*args: object, **kwargs: object) -> object:
        raise FileNotFoundError("git")

    here = origin.origin_now("planners", {})
    monkeypatch.setattr(subprocess, "run", missing)
    without = origin.origin_now("planners", {})
    assert without.modules == here.modules
    assert without.commit == ""
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=128, stdout="", stderr="fatal"))
    assert origin.origin_now("planners", {}).commit == ""
