"""Ratios of seconds hold whatever the clock did in between."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from harness.measuring import Times


def test_a_step_that_the_clock_did_not_see_is_not_the_best() -> None:
    ours, theirs = Times((0.0, 3.0, 4.0)), Times((2.0, 2.0, 0.0))
    assert ours.best_ratio(theirs) == pytest.approx(1.5)
    assert ours.median_ratio(theirs) == pytest.approx(1.5)


def test_steps_that_no_clock_saw_have_ratios() -> None:
    unseen = Times((0.0,))
    assert unseen.best_ratio(unseen) == unseen.median_ratio(unseen) == 1.0
