"""Whatever goes wrong on one rank by our doing is named on every rank, and whatever may differ between ranks trains.

Each case is a training over gloo, where a rank that has failed goes on to live: nobody is woken by its end.
"""

from __future__ import annotations

import pytest

from rank_cases.cases import MODES
from rank_cases.hazards import HAZARDS, Hazard, judge
from rank_cases.launch import run_ranks

SAMPLE = {
    "refused at the first call, and the loop goes on": "plain",
    "a new shape is refused": "unused",
    "the same, with buffers": "views",
    "two forwards to a backward, refused": "plain",
    "drops a graph alone, then is refused": "plain",
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
    if name.startswith("other bits"):
        assert all("gradients of this step are not whole" in each.text for each in found.outcomes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("hazard", "mode"),
    [(each, mode) for each in HAZARDS for mode in MODES if each.is_tried_in(mode)],
    ids=lambda each: _named(each) if isinstance(each, Hazard) else each,
)
def test_every_mode(hazard: Hazard, mode: str) -> None:
    assert not judge(hazard, mode, 2).wrong


def test_a_process_may_train_in_another_group_later() -> None:
    fitted, plain = (run_ranks("groups", fitted=fitted) for fitted in (True, False))
    assert not [each.text for each in (*fitted, *plain) if each.error]
    assert [each.found for each in fitted] == [each.found for each in plain]


@pytest.mark.long
@pytest.mark.parametrize("hazard", [each for each in HAZARDS if each.modes], ids=_named)
def test_four_ranks(hazard: Hazard) -> None:
    assert not judge(hazard, "plain", 4).wrong
