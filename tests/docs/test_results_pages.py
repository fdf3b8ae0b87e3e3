"""The pages that are made of result files are what the files give; staleness is seen, and a release has none."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, read

sys.path.insert(0, str(ROOT / "benchmarks"))

from publish import benchmarks_page
from publish.__main__ import _changed as _why
from publish.__main__ import written, wrong
from publish.plot import Series, plot
from publish.results import Result, all_results, without_peer

ALONE = {"hybrid_bound", "models", "opinfo", "promises", "soak", "structure", "torch_versions", "trainers"}
"""Benchmarks that race nobody: one that is added here loses its peer on purpose."""


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return all_results()


def test_the_pages_are_what_the_result_files_give(results: list[Result]) -> None:
    assert wrong(written(results)) == [], "run make pages"


def test_pages_are_made_of_result_files_alone(results: list[Result], tmp_path: Path) -> None:
    """Another process, another folder, another hash seed: the same bytes."""
    code = (
        "from pathlib import Path; from publish.__main__ import written; from publish.results import all_results; "
        f"here = Path({str(tmp_path)!r}); "
        "files = written(all_results(), here); (here / 'plots').mkdir(); "
        "[path.write_text(text) for path, text in files.items()]"
    )
    environment = {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT / "benchmarks"), "PATH": ""}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True)
    for path, text in written(results, tmp_path).items():
        assert path.read_text(encoding="utf-8") == text


def test_every_result_file_says_what_it_is_of(results: list[Result]) -> None:
    for result in results:
        cases = set(result.data.get("case_seconds", result.data.get("parts")))
        assert {case for each in result.origins for case in each.cases} == cases, result.name
        assert all(each.commit and each.modules and each.machine for each in result.origins), result.name


def _changed(result: Result, today: dict[str, str]) -> Result:
    return Result(result.name, result.benchmark, copy.deepcopy(result.data), today)


def test_a_result_is_stale_when_a_part_differs_and_the_page_says_so(results: list[Result]) -> None:
    [known] = [each for each in results if each.name == "planners"]
    for each in known.data["origins"]:
        each["modules"] = known.today
    fresh = _changed(known, known.today)
    assert not fresh.is_stale
    assert "| current |" in benchmarks_page.page([fresh])
    stale = _changed(known, {**known.today, "planners": "another"})
    assert stale.is_stale
    assert "**stale**: some have changed since" in benchmarks_page.page([stale])
    assert _why(stale) == "changed since: planners"
    unrecorded = _changed(known, {**known.today, "cost": "new"})
    assert unrecorded.is_stale


def test_a_figure_that_is_changed_by_hand_is_seen(results: list[Result], tmp_path: Path) -> None:
    files = written(results, tmp_path)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert wrong(files, tmp_path) == []
    page = tmp_path / "papers.md"
    page.write_text(page.read_text(encoding="utf-8").replace("64", "65", 1), encoding="utf-8")
    (tmp_path / "plots" / "nobody-makes-this.svg").write_text("<svg/>", encoding="utf-8")
    assert wrong(files, tmp_path) == ["papers.md", "plots/nobody-makes-this.svg"]


def _tags() -> list[str]:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), "tag", "--points-at", "HEAD"], capture_output=True, text=True)
    except OSError:
        return []
    return [tag for tag in done.stdout.split() if tag.startswith("v")] if done.returncode == 0 else []


@pytest.mark.skipif(not _tags(), reason="this commit has no tag of a release")
def test_a_release_has_no_stale_result(results: list[Result]) -> None:
    assert [each.name for each in results if each.is_stale] == []


def test_a_release_check_names_what_is_stale(results: list[Result], capsys: pytest.CaptureFixture[str]) -> None:
    from publish import __main__ as publish

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["publish", "--release"])
        code = publish.main()
    stale = {each.name for each in results if each.is_stale}
    said = capsys.readouterr().out
    assert code == (1 if stale else 0)
    assert all(f"{name} is stale" in said for name in stale)


def test_a_plot_has_every_point_and_every_label() -> None:
    svg = plot(
        "a & b", "across", "up", [Series("ours", [(1.0, 1.2), (2.0, 1.0)], joined=True), Series("theirs", [(2.0, 1.5)])]
    )
    assert svg.count("<circle") == 3 + 2, "points and the legend's"
    assert "a &amp; b" in svg
    assert ">ours<" in svg


def test_result_files_are_plain_json() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        assert "origins" in data, f"{path.name} does not say what it is of"


def test_every_benchmark_that_has_no_peer_says_why() -> None:
    told = without_peer()
    assert told.keys() == ALONE
    text = read(ROOT / "docs" / "benchmarks.md").partition("## Benchmarks without a peer")[2].partition("\n## ")[0]
    for name, why in told.items():
        assert f"| {name} | {why} |" in text
