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


@pytest.mark.parametrize(("rounds", "left_out"), [(3, 0), (5, 0), (6, 0), (9, 1), (15, 3), (21, 5)])
def test_the_interval_of_a_median_leaves_out_what_falls_outside_at_most_once_in_twenty(
    rounds: int, left_out: int
) -> None:
    """As tables of the sign test have it: of 15 rounds the fourth and the twelfth."""
    ours, theirs = Times(tuple(float(i) for i in range(1, rounds + 1))), Times((1.0,) * rounds)
    low, high = ours.median_ratio_interval(theirs)
    assert (low, high) == (1.0 + left_out, float(rounds - left_out))
    assert low <= ours.median_ratio(theirs) <= high
