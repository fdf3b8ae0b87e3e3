"""What is printed of a small step on a card says what its figures are made of."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from plans import LINKED, recomputed

from ebbtide.report.text.compare import write_rows
from ebbtide.report.text.plan import starting_of, text_of, write_plan


@pytest.mark.parametrize(("seconds", "told"), [(1.25e-4, "80.00 %"), (2.1e-4, ""), (9e-5, "100.00 %"), (0.0, "")])
def test_a_step_that_mostly_starts_kernels_says_so(seconds: float, told: str) -> None:
    note = starting_of(100, seconds, LINKED)
    assert note.startswith(told)
    assert bool(note) == bool(told)
    assert starting_of(100, seconds, None) == starting_of(100, seconds, replace(LINKED, name="cpu")) == ""


def test_plans_and_comparisons_print_it() -> None:
    plan = recomputed(3)
    machine = replace(LINKED, launch_seconds=plan.program.seconds / len(plan.program.ops))
    stream = StringIO()
    write_plan(replace(plan, machine=machine), stream)
    assert "percentages of time say little of a step this small" in stream.getvalue()
    assert "percentages" not in text_of(plan)
    stream = StringIO()
    write_rows([], stream, "a note")
    assert stream.getvalue() == "a note\n"


def test_what_is_resident_is_printed_by_kind() -> None:
    plan = recomputed(3)
    parts = {"weights": 36 * 2**20, "cuBLAS workspace": 64 * 2**20}
    told = "  resident   64.00 MiB cuBLAS workspace, 36.00 MiB weights\n"
    for each, count in ((replace(plan, resident_parts=parts), 1), (plan, 0)):
        stream = StringIO()
        write_plan(each, stream)
        assert stream.getvalue().count(told) == count
