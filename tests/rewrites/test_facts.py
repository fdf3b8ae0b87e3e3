"""Facts are measured once, in the room that there is, and kept on disk."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebbtide
from ebbtide.cost.profiling_budget import ProfilingBudget, profiling_within
from ebbtide.errors import BudgetError
from ebbtide.measurement.cpu_allocations import AllocationRecorder, peak_above
from ebbtide.rewrites import facts
from ebbtide.rewrites.facts import ALIGNMENT, Fact, either, measured, normal, own
from ebbtide.torch_seams.fake_tensors import without_modes


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_KNOWN", {})


_names = (f"fact {number} of process {os.getpid()}" for number in itertools.count())  # processes share what is kept


def counted(holds: bool, size: int = 0, smaller: Fact | None = None) -> tuple[Fact, list[int]]:
    calls: list[int] = []

    def measure() -> bool:
        calls.append(1)
        return holds

    return Fact(next(_names), "slices are as the whole", size, measure, smaller), calls


@pytest.mark.parametrize("holds", [True, False])
def test_a_fact_is_measured_once_and_kept(holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fact, calls = counted(holds)
    assert measured([fact, fact], "cpu") == {fact.signature: holds}
    monkeypatch.setattr(facts, "_KNOWN", {})  # as another process
    assert measured([fact], "cpu") == {fact.signature: holds}
    assert len(calls) == 1


def test_without_room_nobody_knows() -> None:
    fact, calls = counted(True, size=1000)
    with profiling_within(ProfilingBudget(999)):
        assert measured([fact], "cpu") == {fact.signature: None}
    assert not calls
    with profiling_within(ProfilingBudget(int(1000 * facts._BESIDES))):
        assert measured([fact], "cpu") == {fact.signature: True}


def test_without_room_a_smaller_one_will_do() -> None:
    smaller, calls = counted(True, size=10)
    fact, large = counted(False, size=1000, smaller=smaller)
    with profiling_within(ProfilingBudget(100)):
        assert measured([fact], "cpu") == {fact.signature: True}
    assert (len(calls), len(large)) == (1, 0)
    assert measured([fact], "cpu") == {fact.signature: False}


def test_without_room_what_is_made_up_lies_in_files() -> None:
    fact, calls = counted(True, size=1000)
    fact = replace(fact, made_bytes=10)
    with profiling_within(ProfilingBudget(10)):
        assert measured([fact], "cpu") == {fact.signature: None}
    with profiling_within(ProfilingBudget(11)):
        assert measured([fact], "cpu") == {fact.signature: True}
    assert calls == [1]


def test_a_disk_without_room_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(count: int, dtype: torch.dtype) -> torch.Tensor:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(facts, "mapped", full)
    fact = Fact("full", "it is", 1000, lambda: normal((3,), torch.float32, "cpu", 1).numel() == 3, made_bytes=0)
    with profiling_within(ProfilingBudget(11)) as room:
        assert measured([fact], "cpu") == {"full": None}
    assert room.unknown_facts
    assert measured([fact], "cpu") == {"full": True}


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


# -- what measuring takes ------------------------------------------------------------------------------------------


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(F.silu(self.gate(x)) * self.up(x))).square().mean()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192)
        self.register_buffer("mask", torch.ones(128, 128).triu(1).bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.view(4, 128, 4, 16).transpose(1, 2) for each in self.project(x).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1) / 4).masked_fill(self.mask, float("-inf"))
        return (F.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v).square().mean()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 999)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).float(), labels, label_smoothing=0.1)


def given_to(model: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    if isinstance(model, Attention):
        return (torch.randn(4, 128, 64, dtype=dtype, requires_grad=True),)
    x = torch.randn(1024, 64, dtype=dtype, requires_grad=True)
    return (x, torch.randint(0, 999, (1024,))) if isinstance(model, Head) else (x,)


SMALL_BYTES = 2**17
"""A tensor of a few numbers for each row."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [FeedForward, Attention, Head])
def test_measuring_takes_no_more_than_it_says(
    kind: type[nn.Module], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All facts that are asked for by a plan, and the smaller ones in their place, by the allocator's own count.

    In memory, and with what can lie in files there: both find the same.
    """
    taken: dict[str, tuple[int, int]] = {}
    held_in_files = facts._held_in_files

    def counted(fact: Fact, device: str) -> bool | None:
        if fact.signature not in taken:
            recorder = AllocationRecorder()
            recorder.start()
            with without_modes(), torch.no_grad():
                held = fact.holds()
            taken[fact.signature] = fact.bytes, peak_above(recorder.stop())
            if fact.made_bytes is not None:
                recorder = AllocationRecorder()
                recorder.start()
                assert held_in_files(fact, device) == held
                taken[f"in files: {fact.signature}"] = fact.made_bytes + SMALL_BYTES, peak_above(recorder.stop())
            if fact.smaller is not None:
                counted(fact.smaller, device)
            return held
        return True

    monkeypatch.setattr(facts, "_measured", counted)
    model = kind().to(dtype)
    with pytest.raises(BudgetError):
        ebbtide.plan(model, given_to(model, dtype), budget=1, options=ebbtide.Options(rewrites="all", progress=None))
    assert len(taken) > 4
    assert {each: found for each, found in taken.items() if found[1] > facts._BESIDES * found[0]} == {}


def test_what_a_rewrite_makes_itself_is_measured_at_an_address_of_its_own() -> None:
    whole = torch.arange(7 * 41 * 3, dtype=torch.float32).view(7, 41, 3)
    for part in (whole[3:5], whole[3:5].mT, whole[:, 5:9], whole[1], whole[1, 2]):
        found = own(part)
        assert torch.equal(found, part)
        assert found.data_ptr() % 64 == 0
        assert found.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
        assert found.is_contiguous() or found.mT.is_contiguous()
    assert own(whole[3:5].mT).stride() == whole[3:5].mT.stride()


def test_both_ways_are_tried_where_a_slice_begins_elsewhere() -> None:
    whole = torch.arange(600, dtype=torch.float32).view(200, 3)
    first = (-whole.data_ptr() % ALIGNMENT) // 4  # elements until the next such address
    aligned, other = whole.view(-1)[first:], whole.view(-1)[first + 1 :]
    assert len(list(either(aligned))) == 1
    assert len(list(either(other))) == 2
    assert all(torch.equal(each, other) for each in either(other))
