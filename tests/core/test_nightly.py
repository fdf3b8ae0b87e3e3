"""The summary of ``make nightly``: what it counts, what it names, and what it says was not run."""

from __future__ import annotations

import json
from pathlib import Path

import nightly

REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.core.test_a" name="test_one"/>
<testcase classname="tests.core.test_a" name="test_two[3]"><failure message="no"/></testcase>
<testcase classname="tests.core.test_b" name="test_three"><skipped/></testcase>
</testsuite></testsuites>"""


def test_counts_are_those_of_the_report(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert nightly.counts(tmp_path / "report.xml") == {
        "tests": 3,
        "skipped": 1,
        "failed": ["tests/core/test_a.py::test_two[3]"],
    }


def test_the_page_says_what_failed_and_what_was_not_run() -> None:
    results = {
        "lint": {"code": 0, "seconds": 2},
        "tests/core": {
            "code": 1,
            "seconds": 30,
            "tests": 3,
            "skipped": 1,
            "failed": ["tests/core/test_a.py::test_two"],
        },
    }
    text = nightly.page(results, ["lint", "types", "tests/core"], {"Date": "2026-01-01", "version": "0.1.0"})
    assert text.splitlines()[4:] == [
        "Date 2026-01-01, version 0.1.0. Failed: tests/core.",
        "",
        "| part | tests | failed | skipped | seconds |",
        "|---|---|---|---|---|",
        "| lint |  | 0 |  | 2 |",
        "| tests/core | 3 | 1 | 1 | 30 |",
        "",
        "Not run: types.",
        "",
        "Tests that failed:",
        "",
        "- `tests/core/test_a.py::test_two`",
    ]


def test_a_run_goes_on_only_with_the_same_sources(tmp_path: Path) -> None:
    state = tmp_path / "nightly.json"
    assert nightly.known_results("01", state) == {}
    state.write_text(json.dumps({"sources": "01", "results": {"lint": {"code": 0, "seconds": 1}}}))
    assert nightly.known_results("01", state) == {"lint": {"code": 0, "seconds": 1}}
    assert nightly.known_results("02", state) == {}
    state.write_text(state.read_text()[:20])
    assert nightly.known_results("01", state) == {}


def test_every_folder_of_tests_is_a_part() -> None:
    parts = nightly.parts()
    tests = Path(__file__).parents[1]
    folders = {f"tests/{path.relative_to(tests).parts[0]}" for path in tests.rglob("test_*.py")}
    assert folders <= set(parts)
    assert set(nightly.TARGETS) <= set(parts)
