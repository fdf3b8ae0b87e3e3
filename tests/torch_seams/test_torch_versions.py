"""What ``make test-torch`` writes down of a test run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_good" />
<testcase classname="tests.a" name="test_bad"><failure message="no">text</failure></testcase>
<testcase classname="tests.b" name="test_broken"><error message="no">text</error></testcase>
<testcase classname="tests.b" name="test_left_out"><skipped message="no card">text</skipped></testcase>
<testcase classname="tests.b" name="test_with_output"><system-out>text</system-out></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "torch_versions.py"
    spec = importlib.util.spec_from_file_location("torch_versions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.counts(REPORT) == {
        "passed": 2,
        "failed": 2,
        "skipped": 1,
        "failures": ["tests.a::test_bad", "tests.b::test_broken"],
    }
