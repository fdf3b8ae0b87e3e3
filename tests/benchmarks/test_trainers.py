"""The table of ``benchmarks/trainers.py``: whole, and of situations that are held to what it claims."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

for name in ("accelerate", "datasets", "lightning", "peft", "torchmetrics", "transformers", "trl"):
    pytest.importorskip(name)

import trainers  # noqa: E402 - needs the trainers
from harness.record import Record, Row, at_most, holds  # noqa: E402
from situations.registry import all_situations  # noqa: E402

GROUPS = ("trainers", "adapted", "accelerated", "lightning", "preferred", "distributed")


@pytest.mark.parametrize("trainer", trainers.TRAINERS)
def test_every_cell_is_a_situation_that_is_planned_and_whose_captures_are_held(trainer: str) -> None:
    known = all_situations(GROUPS)
    cells = trainers.TRAINERS[trainer]
    assert tuple(cells) == trainers.CELLS
    assert len(set(cells.values())) == 11
    for cell, name in cells.items():
        situation = known[name]
        assert (situation.refused, situation.limit, situation.calls) == (None, "", None)
        assert situation.captures in (
            (4,) if cell == "lengths" else (2,) if cell in ("resumed", "last batch") else (None,)
        )
        assert not situation.over


def _cell(name: str, *checks: object, why: str = "") -> Row:
    columns = {"case": name, "seconds": 1.0, "eager_bytes": 8, "peak_bytes": 6, "planned_calls": 3, "calls": 3}
    return trainers._cell(Row("trainers", columns | {"why": why}, checks))  # type: ignore[arg-type]


def test_the_matrix_says_what_is_equal_what_misses_and_what_was_not_run() -> None:
    record = Record("trainers", trainers.TITLES, {})
    record.rows = [
        _cell("trainer_callback_plain", holds("equal bits", True)),
        _cell("trainer_callback_bf16", at_most("bytes over budget", 9000, 1024), why="over budget at steps 0"),
    ]
    rows = trainers._joined(None, record).rows
    line = next(row for row in rows if row.columns.get("trainer") == "Trainer" and row.question == "matrix")
    assert line.columns["plain"] == "equal"
    assert line.columns["bf16"] == "MISS: over budget at steps 0; bytes over budget"
    assert line.columns["spawn"] == "not run"
    counts = next(row for row in rows if row.question == "counts")
    assert (counts.columns["cells"], counts.columns["right"], counts.columns["over budget"]) == (2, 1, 1)
    assert not counts.passed


def test_a_later_run_replaces_its_cells_and_keeps_the_others() -> None:
    before, record = Record("trainers", trainers.TITLES, {}), Record("trainers", trainers.TITLES, {})
    before.rows = [_cell("ddp_plain", holds("equal bits", False)), _cell("ddp_bf16", holds("equal bits", True))]
    record.rows = [_cell("ddp_plain", holds("equal bits", True))]
    rows = trainers._joined(trainers._joined(None, before), record).rows
    line = next(row for row in rows if row.columns.get("trainer", "").startswith("DDP") and row.question == "matrix")
    assert (line.columns["plain"], line.columns["bf16"]) == ("equal", "equal")
    assert sum(row.question == "matrix" for row in rows) == len(trainers.TRAINERS)
