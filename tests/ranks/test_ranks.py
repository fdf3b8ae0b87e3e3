"""Whatever goes wrong on one rank by our doing is named on every rank, and whatever may differ between ranks trains.

Each case is a training over gloo, where a rank that has failed goes on to live: nobody is woken by its end.
"""

from __future__ import annotations

import pytest

from rank_cases.cases import MODES
from rank_cases.hazards import HAZARDS, Hazard, judge

SAMPLE = {
    "refused at the first call, and the loop goes on": "plain",
    "a new shape is refused": "unused",
    "the same, with buffers": "views",
    "other bits in the first backward": "static",
    "SIGKILL of rank 0 while planning": "plain",
    "Ctrl-C while planning": "plain",
    "other budgets": "plain",
}
"""The mode of each hazard that every change is tried on."""
_BY_NAME = {each.name: each for each in HAZARDS}


def _named(hazard: Hazard) -> str:
    return hazard.name.replace(" ", "_").replace(",", "")


@pytest.mark.parametrize("name", SAMPLE)
def test_two_ranks(name: str) -> None:
    found = judge(_BY_NAME[name], SAMPLE[name], 2)
    assert not found.wrong
    if "backward" in name:
        assert all("gradients of this step are not whole" in each.text for each in found.outcomes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("hazard", "mode"), [(each, mode) for each in HAZARDS for mode in MODES if each.is_tried_in(mode)]
)
def test_every_mode(hazard: Hazard, mode: str) -> None:
    assert not judge(hazard, mode, 2).wrong


@pytest.mark.long
@pytest.mark.parametrize("hazard", [each for each in HAZARDS if each.modes], ids=_named)
def test_four_ranks(hazard: Hazard) -> None:
    assert not judge(hazard, "plain", 4).wrong
