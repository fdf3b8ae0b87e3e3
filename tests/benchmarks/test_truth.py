"""``truth.py`` counts a plan as predicted by its error, or by the interval of what was measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from harness.record import Row
from questions import overhead


def _row(case: str, budget: str, near: bool, error: float) -> Row:
    columns: dict[str, Any] = {"case": case, "budget": budget, "near": near, "error": error}
    return Row("overhead", columns)


def test_the_summary_is_of_plans_alone_per_number_of_threads() -> None:
    rows = [_row("gpt, 1 thread", overhead.KEEP_ALL, True, 0.0)]
    rows += [_row("gpt, 1 thread", f"{i}%", i > 0, -0.01 * i) for i in range(8)]
    (found,) = overhead.summary(rows)
    assert found.columns == {"case": "all, 1 thread", "plans": 8, "near": 7 / 8, "error": -0.07}
    assert not found.passed
    better = [
        *rows,
        *(_row("vgg16, 1 thread", f"{i}%", True, 0.0) for i in range(2)),
        _row("gpt, 2 threads", "5%", True, 0),
    ]
    one, two = overhead.summary(better)
    assert one.columns["near"] == 0.9
    assert one.passed
    assert two.columns["plans"] == 1


def test_every_model_is_built_with_the_same_numbers_each_time() -> None:
    for name in ("readme", "chain-64"):
        one, two = overhead.built(name), overhead.built(name)
        assert all(bool((a == b).all()) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    assert len(overhead.MODELS) == 12
    assert len(overhead.CASES) == 24
