"""Threads that measure at the same time: a process has one profiler, and two at once end it."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.measurement.cpu_allocations import AllocationRecorder, ProfilerActive, profiler_active
from ebbtide.measurement.peak import StepGauge
from ebbtide.measurement.step_record import StepRecord


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
    assert not profiler_active()


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work`` on threads at once; what one of them raises is raised."""
    failed: list[BaseException] = []
    together = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            together.wait(60)
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failed:
        raise failed[0]


def test_one_at_a_time_records_and_the_others_wait_or_are_told() -> None:
    told: list[int] = []

    def record(number: int) -> None:
        for turn in range(100):
            recorder = AllocationRecorder()
            try:
                recorder.start(60.0 if turn % 2 else 0.0)
            except ProfilerActive:
                told.append(number)
                continue
            kept = torch.empty(1000 + number, dtype=torch.uint8)
            assert sum(event.bytes for event in recorder.stop()) == kept.nbytes

    _in_threads(4, record)
    assert len(told) < 4 * 50, "who has patience is never told"


def test_gauges_do_without_where_another_thread_records() -> None:
    recorder = AllocationRecorder()
    recorder.start()
    try:

        def look(_: int) -> None:
            gauge = StepGauge("cpu")
            for _ in range(2):
                gauge.begin()
                gauge.end()
            assert gauge.disturbed
            record = StepRecord("cpu", start_bytes=0, done=lambda _: pytest.fail("nothing was seen"), returned=int)
            record.begin()
            assert not record.open

        _in_threads(1, look)
    finally:
        recorder.stop()


def test_nobody_elses_profiler_is_waited_for() -> None:
    begin = time.monotonic()
    with torch.profiler.profile(acc_events=True), pytest.raises(ProfilerActive):
        AllocationRecorder().start(60.0)
    assert time.monotonic() - begin < 30


def test_threads_that_meet_new_shapes_at_once_have_eagers_gradients() -> None:
    plain = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(48, 48), nn.GELU())), nn.Linear(48, 1))
    models = [
        ebbtide.fit(copy.deepcopy(plain), "100%", progress=None, options=ebbtide.Options(effort=50)) for _ in range(3)
    ]

    def train(number: int) -> None:
        for turn in range(2):
            x = torch.randn(16 + 8 * turn + number, 48, generator=torch.Generator().manual_seed(turn))
            own = torch.autograd.grad(models[number](x).square().mean(), list(models[number].parameters()))
            true = torch.autograd.grad(plain(x).square().mean(), list(plain.parameters()))
            assert all(torch.equal(a, b) for a, b in zip(own, true, strict=True))

    _in_threads(3, train)
    assert all(ebbtide.calls_of(each).planned == 2 for each in models)
