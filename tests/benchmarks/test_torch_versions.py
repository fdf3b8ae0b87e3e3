"""What ``make test-torch`` writes down of a test run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from torch_versions import counts

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_good" />
<testcase classname="tests.a" name="test_bad"><failure message="no">text</failure></testcase>
<testcase classname="tests.b" name="test_broken"><error message="no">text</error></testcase>
<testcase classname="tests.b" name="test_left_out"><skipped message="no card">text</skipped></testcase>
<testcase classname="tests.b" name="test_with_output"><system-out>text</system-out></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted() -> None:
    assert counts(REPORT) == {
        "passed": 2,
        "failed": 2,
        "skipped": 1,
        "failures": ["tests.a::test_bad", "tests.b::test_broken"],
    }
