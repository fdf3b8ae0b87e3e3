"""Facts are measured once, in the room that there is, and kept on disk."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from ebbflow.cost.room import Room, within
from ebbflow.rewrites import facts
from ebbflow.rewrites.facts import Fact, measured, normal


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_KNOWN", {})


_names = itertools.count()


def counted(holds: bool, size: int = 0, smaller: Fact | None = None) -> tuple[Fact, list[int]]:
    calls: list[int] = []

    def measure() -> bool:
        calls.append(1)
        return holds

    return Fact(f"fact {next(_names)}", "slices are as the whole", size, measure, smaller), calls


@pytest.mark.parametrize("holds", [True, False])
def test_a_fact_is_measured_once_and_kept(holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fact, calls = counted(holds)
    assert measured([fact, fact], "cpu") == {fact.signature: holds}
    monkeypatch.setattr(facts, "_KNOWN", {})  # as another process
    assert measured([fact], "cpu") == {fact.signature: holds}
    assert len(calls) == 1


def test_without_room_nobody_knows() -> None:
    fact, calls = counted(True, size=1000)
    with within(Room(999)):
        assert measured([fact], "cpu") == {fact.signature: None}
    assert not calls
    with within(Room(1000)):
        assert measured([fact], "cpu") == {fact.signature: True}


def test_without_room_a_smaller_one_will_do() -> None:
    smaller, calls = counted(True, size=10)
    fact, large = counted(False, size=1000, smaller=smaller)
    with within(Room(100)):
        assert measured([fact], "cpu") == {fact.signature: True}
    assert (len(calls), len(large)) == (1, 0)
    assert measured([fact], "cpu") == {fact.signature: False}


@pytest.mark.parametrize("text", ["", "{", '{"schema": "other"}', '{"facts": 3}', '{"facts": {"f": "yes"}}'])
def test_a_damaged_file_is_not_believed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = facts._cache("cpu")
    fact, calls = counted(False)
    cache.add({fact.signature: True})
    assert cache.load()[fact.signature]
    if text.startswith('{"facts"'):
        whole = json.loads(cache.path.read_text())
        text = json.dumps({**whole, **json.loads(text)})
    cache.path.write_text(text)
    assert cache.load() == {}
    assert measured([fact], "cpu") == {fact.signature: False}
    assert calls


def test_numbers_are_normal_and_generators_left_alone() -> None:
    before = torch.get_rng_state()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        made = normal((4000,), dtype, "cpu", 1).double()
        assert abs(float(made.mean())) < 0.1
        assert 0.9 < float(made.std()) < 1.1
    assert torch.equal(before, torch.get_rng_state())
