"""The pages of results are what the result files give; a result says where it is from, and what contradicts it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from harness.checked import Checked
from harness.origin import Origin, version_now
from publish import __main__ as publish
from publish import benchmarks_page
from publish.figures import WHICH_BUDGET
from publish.plot import Series, plot
from publish.results import Result, all_results, without_peer

ALONE = {
    "hybrid_bound",
    "models",
    "opinfo",
    "pieces",
    "promises",
    "ranks",
    "reports",
    "soak",
    "structure",
    "torch_versions",
    "trainers",
    "truth",
}
"""Benchmarks that race nobody: one that is added here loses its peer on purpose."""


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return all_results()


def test_pages_are_made_of_result_files_alone(results: list[Result], tmp_path: Path) -> None:
    """Another process, another hash seed, no git: the same bytes."""
    code = (
        "from pathlib import Path; from publish.__main__ import pages, write; from publish.results import all_results; "
        f"write(pages(all_results()), Path({str(tmp_path)!r}))"
    )
    environment = {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT / "benchmarks"), "PATH": ""}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True)
    files = publish.pages(results)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")} == files.keys()
    for name, text in files.items():
        assert (tmp_path / name).read_text(encoding="utf-8") == text


def test_the_picture_of_the_budgets_page_is_that_of_the_results(results: list[Result]) -> None:
    """`make pages` writes it."""
    kept = (ROOT / "docs" / "which-budget.svg").read_text(encoding="utf-8")
    assert kept == publish.pages(results)[f"plots/{WHICH_BUDGET}.svg"]


def test_every_result_has_a_table_of_its_rows_with_the_title_of_every_question(results: list[Result]) -> None:
    files = publish.pages(results)
    for result in results:
        if "rows" in result.data:
            table = files[f"results/{result.name}.md"]
            assert all(f"## {title}\n" in table for title in result.data["titles"].values()), result.name
            assert {row["question"] for row in result.rows} <= result.data["titles"].keys(), result.name


def test_writing_leaves_nothing_of_before(tmp_path: Path) -> None:
    publish.write({"plots/old.svg": "<svg/>"}, tmp_path / "pages")
    publish.write({"benchmarks.md": "# B\n"}, tmp_path / "pages")
    assert [path.name for path in (tmp_path / "pages").rglob("*")] == ["benchmarks.md"]


def test_every_result_file_says_what_it_is_of(results: list[Result]) -> None:
    for result in results:
        cases = set(result.data.get("case_seconds", result.data.get("parts")))
        assert {case for each in result.origins for case in each.cases} == cases, result.name
        assert all(each.commit and each.version and each.machine["date"] for each in result.origins), result.name


def _sampled(result: Result, *contradicted: str, held: str = "") -> Result:
    origin = Origin("c0ffee1234", False, "1", {"date": "2026-01-02"}, cases=("q:a",))
    return replace(result, sample=Checked(result.name, origin, 3, contradicted, contradicted, 5, 1, held))


def test_a_result_is_stale_while_its_latest_sample_contradicts_it(results: list[Result]) -> None:
    [known] = [each for each in results if each.name == "planners"]
    held = _sampled(known, held="2026-01-02 at c0ffee1")
    assert not held.is_stale
    assert "| 2026-01-02 at c0ffee1 |" in benchmarks_page.page([held])
    assert "1 cases, 3 of 3 targets met; bytes, counts and verdicts: 5 as in the result, 1 other" in (
        benchmarks_page.page([held])
    )
    stale = _sampled(known, "oracle, 1: gap 3, not <= 2", held="2026-01-01 at beef123")
    page = benchmarks_page.page([stale])
    assert stale.is_stale
    assert "| **stale**, held 2026-01-01 at beef123 |" in page
    assert "oracle, 1: gap 3, not <= 2" in page
    unsampled = replace(known, sample=None)
    assert not unsampled.is_stale
    assert "| no sample since |" in benchmarks_page.page([unsampled])


def test_a_release_measures_everything_again(results: list[Result]) -> None:
    one = results[0]
    of_now = [{**each, "version": version_now()} for each in one.data["origins"]]
    fresh = Result("x", one.benchmark, {**one.data, "origins": of_now})
    older = Result("x", one.benchmark, {**one.data, "origins": [{**of_now[0], "version": "0.0.9"}]})
    assert publish.to_measure_again([fresh]) == []
    assert publish.to_measure_again([older]) == [f"x was made with 0.0.9, not with {version_now()}"]
    assert publish.to_measure_again([_sampled(fresh, "it did not")]) == [
        "x is stale: its latest sample came out otherwise"
    ]


def _tags() -> list[str]:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), "tag", "--points-at", "HEAD"], capture_output=True, text=True)
    except OSError:
        return []
    return [tag for tag in done.stdout.split() if tag.startswith("v")] if done.returncode == 0 else []


@pytest.mark.skipif(not _tags(), reason="this commit has no tag of a release")
def test_a_tagged_release_has_all_its_results(results: list[Result]) -> None:
    assert f"v{version_now()}" in _tags()
    assert publish.to_measure_again(results) == []


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
    reasons = without_peer()
    assert reasons.keys() == ALONE
    text = benchmarks_page.page([]).partition("## Benchmarks without a peer")[2].partition("\n## ")[0]
    for name, why in reasons.items():
        assert f"| {name} | {why} |" in text
