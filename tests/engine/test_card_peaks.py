"""A card's peak statistic is what its user would have read, though parts of a step were measured with it.

The card is made up: an allocator with torch's rules for large blocks, best fit and rests that are not split off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.measurement import card_peaks
from ebbtide.measurement.card_peaks import give_back_peak, peaks_kept, reset_peak
from ebbtide.measurement.peak import StepGauge
from ebbtide.measurement.reserved import Reserved
from ebbtide.measurement.step_record import Part, StepRecord, Taken

MIB = 2**20


@dataclass
class Card:
    """Free blocks of one stream, what is allocated, and the statistic."""

    free: list[int] = field(default_factory=list[int])
    allocated: int = 0
    peak: int = 0
    asked: int = 0
    """Bytes that were not there and would have been asked of the card."""

    def take(self, size: int) -> int:
        """What a request of ``size`` is given."""
        fitting = sorted(each for each in self.free if each >= size)
        if not fitting:
            self.asked += size
            given = size
        else:
            (block, *_) = fitting
            self.free.remove(block)
            given = size if block - size > MIB else block
            if block > given:
                self.free.append(block - given)
        self.allocated += given
        self.peak = max(self.peak, self.allocated)
        return given

    def give(self, size: int) -> None:
        self.allocated -= size
        self.free.append(size)

    def reset(self) -> None:
        self.peak = self.allocated

    def snapshot(self) -> list[dict[str, Any]]:
        blocks = [{"size": size, "state": "inactive"} for size in self.free]
        kept = {"device": 0, "stream": 7, "segment_pool_id": (0, 0), "segment_type": "large"}
        others = [{**kept, **other} for other in ({"stream": 8}, {"device": 1}, {"segment_pool_id": (0, 3)})]
        foreign = [{"size": 512 * MIB, "state": "inactive"}]
        used = [{"size": 512 * MIB, "state": "active_allocated"}]
        return [{**kept, "blocks": [*blocks, *used]}, *({**each, "blocks": foreign} for each in others)]


class _Held:
    """What a request was given, until it goes."""

    def __init__(self, card: Card, size: int) -> None:
        self.card, self.size = card, card.take(size)

    def __del__(self) -> None:
        self.card.give(self.size)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return _installed(Card(), monkeypatch)


def _installed(card: Card, patch: pytest.MonkeyPatch) -> Card:
    class Stream:
        cuda_stream = 7

    answers: dict[str, Callable[..., Any]] = {
        "max_memory_allocated": lambda: card.peak,
        "memory_allocated": lambda: card.allocated,
        "reset_peak_memory_stats": card.reset,
        "memory_snapshot": card.snapshot,
        "memory_stats": dict,
        "memory_stats_as_nested_dict": lambda: {
            "allocated_bytes": {"all": {"peak": card.peak, "current": card.allocated}}
        },
        "current_stream": Stream,
        "current_device": lambda: 0,
    }
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, answer)
    patch.setattr(card_peaks, "_take", lambda size: _Held(card, size))
    return card


BLOCKS = st.lists(st.integers(3, 4000).map(lambda units: 512 * units + MIB), min_size=1, max_size=8)


@given(BLOCKS, st.integers(0, 40 * MIB), st.integers(0, 64 * MIB))
def test_it_is_given_back_and_never_more(free: list[int], allocated: int, above: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        card = _installed(Card(list(free), allocated, allocated), patch)
        target = allocated + min(above // 512 * 512, sum(free))
        give_back_peak(target)
        assert card.peak <= max(target, allocated)
        assert card.asked == 0, "no memory of the card is asked for"
        assert card.allocated == allocated
        if len(free) == 1:
            assert target - card.peak <= 2 * MIB + 512


def test_what_steps_peaked_at_is_there_again(card: Card) -> None:
    card.free = [64 * MIB, 8 * MIB, 8 * MIB]
    before = _Held(card, 80 * MIB - 16 * MIB)  # the step's forward
    del before
    assert card.peak == 64 * MIB
    reset_peak()
    assert card.peak == 0
    give_back_peak(64 * MIB)
    assert card.peak == 64 * MIB
    give_back_peak(200 * MIB)  # there is no more
    assert card.peak <= 80 * MIB
    assert card.asked == 0


def test_a_snapshot_of_another_form_stops_no_step(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    card.free = [64 * MIB]
    for found in ([{"blocks": []}], [None]):
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda found=found: found)
        give_back_peak(32 * MIB)
    assert card.peak == 0


def _record(*, resets: bool) -> StepRecord:
    return StepRecord("cuda", start_bytes=0, resets=resets, done=lambda _: None, returned=int)


def _taken(start: int, peak: int, left: int) -> Taken:
    return Taken(start * MIB, peak * MIB, left * MIB, peak * MIB, left * MIB)


def _step(card: Card, record: StepRecord, between: Callable[[], object] = int) -> None:
    """100 MiB cross the boundary, a loss takes 20, the backward 60 of its own, hooks take 4."""
    record.begin()
    kept = _Held(card, 100 * MIB)
    record.forward_returned()
    between()
    loss = _Held(card, 20 * MIB)
    del loss
    record.backward_begins(retains=False)
    high = _Held(card, 60 * MIB)
    del high, kept
    if record.steady:
        record._next(Part.BACKWARD)  # outside of a backward nobody says when it ends
    else:
        record.backward_returned()
    after = _Held(card, 4 * MIB)
    del after
    record.end()


def test_a_steady_step_is_read_as_it_runs(card: Card) -> None:
    """Nothing is reset; a part is known that has raised the statistic, or whose user has reset it."""
    card.free = [256 * MIB, 32 * MIB]
    record = _record(resets=False)
    _step(card, record)
    assert record.highest_bytes == card.peak == 160 * MIB
    assert record.parts[Part.WINDOW] == _taken(100, 20, 0)
    assert record.parts[Part.AFTER] == _taken(0, 0, 0)

    earlier = _Held(card, 200 * MIB)  # outside of any step
    del earlier
    record = _record(resets=False)
    _step(card, record)
    assert card.peak == 200 * MIB
    assert record.highest_bytes == 100 * MIB, "what is not known is not claimed"

    record = _record(resets=False)
    _step(card, record, between=card.reset)
    assert record.highest_bytes == card.peak == 160 * MIB


def test_a_first_step_is_read_whole(card: Card) -> None:
    """Costs, what lies between the graphs, and the second step's own gauge leave the step's peak to the user."""
    card.free = [256 * MIB, 32 * MIB]
    with peaks_kept():
        for size in (48, 96, 8):
            reset_peak()
            del_later = _Held(card, size * MIB)
            del del_later
    assert card.peak == 96 * MIB
    card.reset()  # the user's own, before the step

    record = _record(resets=True)
    _step(card, record)
    assert record.parts == {
        Part.FORWARD: _taken(0, 100, 100),
        Part.WINDOW: _taken(100, 20, 0),
        Part.BACKWARD: _taken(100, 60, -100),
        Part.AFTER: _taken(0, 4, 0),
    }
    assert record.highest_bytes == card.peak == 160 * MIB

    card.reset()
    earlier = _Held(card, 150 * MIB)
    del earlier
    gauge = StepGauge("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ebbtide.measurement.peak.reserved_at_peak", lambda: Reserved(card.peak, card.peak, 0))
        for _ in range(2):
            gauge.begin()
            part = _Held(card, 100 * MIB)
            del part
            gauge.end()
        gauge.close()
    assert gauge.above_bytes == 100 * MIB
    assert card.peak == 150 * MIB
