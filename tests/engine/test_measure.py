"""``measure`` counts what the allocator hands out, to the byte, and refuses to share the profiler."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ebbtide
from ebbtide.measurement.cpu_allocations import AllocationEvent, AllocationRecorder, peak_above, profiler_active
from ebbtide.measurement.peak import StepGauge


def test_peak_of_a_hand_computed_block() -> None:
    with ebbtide.measure() as gauge:
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(500, dtype=torch.uint8)
        del a
        c = torch.empty(700, dtype=torch.uint8)
        del b, c
    assert gauge.above_bytes == 1500
    assert gauge.start_bytes == 0
    assert gauge.peak_bytes == 1500


def test_roots_are_the_start_level() -> None:
    root = torch.zeros(256, dtype=torch.uint8)
    with ebbtide.measure(root) as gauge:
        again = root + root
    assert (gauge.start_bytes, gauge.above_bytes, gauge.peak_bytes) == (256, 256, 512)
    del again


def test_release_of_what_was_there_before_does_not_count() -> None:
    old = torch.zeros(10_000, dtype=torch.uint8)
    with ebbtide.measure() as gauge:
        del old
        new = torch.empty(300, dtype=torch.uint8)
    assert gauge.above_bytes == 300
    del new


def test_an_exception_inside_ends_the_measurement() -> None:
    def fail() -> None:
        torch.zeros(100, dtype=torch.uint8).sum()
        raise KeyError("mine")

    gauge = ebbtide.measure()
    with pytest.raises(KeyError, match="mine"), gauge:
        fail()
    assert gauge.above_bytes >= 100
    assert not profiler_active()
    with ebbtide.measure() as after:
        torch.zeros(64, dtype=torch.uint8)
    assert after.above_bytes == 64


def test_measuring_inside_a_measurement_is_refused() -> None:
    with ebbtide.measure() as outer:
        with pytest.raises(RuntimeError, match="profiler is active"), ebbtide.measure():
            pass
        torch.zeros(48, dtype=torch.uint8)
    assert outer.above_bytes == 48


def test_measuring_under_a_profiler_is_refused_and_leaves_it_running() -> None:
    with torch.profiler.profile(profile_memory=True, acc_events=True) as theirs:
        with pytest.raises(RuntimeError, match="profiler is active"), ebbtide.measure():
            pass
        torch.ones(3).sum()
    assert any("sum" in event.key for event in theirs.key_averages())


def test_windows_share_what_is_still_in_use() -> None:
    first = AllocationRecorder()
    first.start()
    kept = torch.empty(400, dtype=torch.uint8)
    assert [e.bytes for e in first.stop()] == [400]
    second = AllocationRecorder(first.live)
    second.start()
    del kept
    assert [e.bytes for e in second.stop()] == [-400]


def test_a_gauge_joins_the_two_windows_of_a_step() -> None:
    gauge = StepGauge("cpu")
    gauge.begin()
    saved = torch.empty(600, dtype=torch.uint8)
    gauge.end()
    between = torch.empty(9000, dtype=torch.uint8)
    gauge.begin()
    gradient = torch.empty(250, dtype=torch.uint8)
    del saved
    gauge.end()
    assert gauge.above_bytes == 850
    del between, gradient


@given(st.lists(st.integers(-100, 100), max_size=20))
def test_peak_is_the_highest_prefix_sum(steps: list[int]) -> None:
    events = [AllocationEvent(i, step) for i, step in enumerate(steps)]
    assert peak_above(events) == max([0, *(sum(steps[: i + 1]) for i in range(len(steps)))])


@pytest.mark.parametrize("place", ["__enter__", "__exit__"])
@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_leaves_no_profiler_open(place: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = AllocationRecorder()
    profile = type(recorder._profile._profile)
    plain = getattr(profile, place)

    def interrupted(*arguments: object) -> object:
        monkeypatch.undo()
        if late:
            plain(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(profile, place, interrupted)
    try:
        recorder.start()
        recorder.stop()
    except KeyboardInterrupt:
        del recorder
    gc.collect()
    assert not profiler_active()
    with ebbtide.measure() as measured:
        torch.empty(1024)
    assert measured.above_bytes == 4096
