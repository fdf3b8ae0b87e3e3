"""On a card buffers move to the host and back on side streams: the same bits, the bytes predicted, no race."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ebbtide
from device_steps import EFFORT, Way, case_of, deterministic, train, workable
from ebbtide.cli import app
from ebbtide.errors import TierError, UsageError
from ebbtide.report.plan import Plan
from ebbtide.step import legality
from ebbtide.step.machine import Link
from ebbtide.step.schedule import Reload
from ebbtide.step.simulate import simulate
from ebbtide.transfers import host
from ebbtide.transfers.arena import Arena
from ebbtide.transfers.host import HostTier, host_tier
from ebbtide.transfers.links import measured_host_link
from ebbtide.transfers.slots import Slot, Space
from random_schedule import DISK_MACHINE, random_schedule

PREDICTION = 0.01
LINKS = {
    "host": Link("host", 2**36, 20e9, 20e9, 1e-5, alignment_bytes=512),
    "disk": Link("disk", 2**36, 1e9, 1e9, 1e-4, duplex=False, alignment_bytes=4096),
}


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with deterministic():
        yield


def moving(unplanned: Plan, seed: int, drop: float, tier: str, room: int = 0) -> Plan:
    """A plan with a random schedule that moves, and its budget."""
    program, machine = unplanned.program, replace(DISK_MACHINE, links={tier: LINKS[tier]})
    schedule = random_schedule(program, seed, drop, tiers=(tier,))
    assert legality.check(program, schedule, links=machine.links) == []
    assert schedule.moves
    above = simulate(program, schedule, machine).above_bytes
    budget = unplanned.resident_bytes + unplanned.reserve_bytes + above + room
    return replace(unplanned, schedule=schedule, machine=machine, tiers=(tier,), budget_bytes=budget)


@pytest.mark.parametrize("tier", LINKS)
@pytest.mark.parametrize("name", ["chain", "gpt"])
def test_a_schedule_that_moves_is_the_same_step(name: str, tier: str, tmp_path: Path) -> None:
    case = case_of(name, "cuda", large=True)
    unplanned = ebbtide.plan(case.model, case.args, budget="1000%", options=ebbtide.Options(effort=EFFORT))
    for seed in range(4):
        plan = moving(unplanned, seed, 0.02 + 0.02 * seed, tier)
        named = "host" if tier == "host" else f"disk:{tmp_path}"
        result = ebbtide.verify(case.model, case.args, {}, plan, options=ebbtide.Options(tiers=named))
        assert result.differences == ()
        assert abs(result.prediction_error) <= PREDICTION
    assert list(tmp_path.iterdir()) == []


def test_fitted_steps_prove_measure_and_keep_their_budget() -> None:
    case = case_of("gpt", "cuda", large=True)
    eager = copy.deepcopy(case.model)
    unplanned = ebbtide.plan(case.model, case.args, budget="1000%", options=ebbtide.Options(effort=EFFORT))
    plan = moving(unplanned, 3, 0.05, "host", room=2 * sum(p.nbytes for p in case.model.parameters()))
    model = ebbtide.fit(case.model, plan, tiers="host", progress=None)
    for _ in range(4):
        state = torch.cuda.get_rng_state()
        for each in (model, eager):
            each.zero_grad()
            torch.cuda.set_rng_state(state)
            each(*case.args).backward()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    step = ebbtide.step_of(model)
    assert step is not None
    assert step.phase.name == "STEADY"
    assert step.verified_buffers >= len({a.buffer for a in plan.schedule.actions if isinstance(a, Reload)})
    assert step.measured_above_bytes == pytest.approx(plan.timeline.above_bytes, rel=PREDICTION)
    assert step.traffic is not None
    assert step.traffic.timed
    assert step.traffic.out_bytes > 0
    assert step.traffic.transfer_seconds > 0
    assert 0 <= step.traffic.hidden_share <= 1


_streams: list[torch.cuda.Stream] = []  # one for all steps: cuBLAS keeps a workspace for each that it has seen


@contextlib.contextmanager
def _own_stream() -> Iterator[None]:
    if not _streams:
        _streams.append(torch.cuda.Stream())
    stream = _streams[0]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("around", [contextlib.nullcontext, _own_stream])
def test_training_with_the_host_is_training(around: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
    """The budget is one that needs much less than half of what eager takes; every step gets the same bits."""
    case = case_of("chain", "cuda", large=True)
    plain = ebbtide.Case(copy.deepcopy(case.model), case.args)
    way = Way(around=around)
    expected = train(plain, way)
    del plain
    budget = workable(case, way, 0.2)
    ebbtide.fit(case.model, budget, tiers="host", options=ebbtide.Options(effort=EFFORT))
    found = train(case, way)
    assert found.same_as(expected)
    assert max(found.peaks) <= budget
    plan = ebbtide.plan_of(case.model)
    assert plan is not None
    assert plan.predicted_peak_bytes == pytest.approx(max(found.peaks[2:]), rel=PREDICTION)


# -- races ---------------------------------------------------------------------------------------------------------


def _slots(sizes: list[int]) -> tuple[Slot, ...]:
    space, device = Space({}), torch.device("cuda", torch.cuda.current_device())
    return tuple(
        Slot(i, f"b{i}", "host", space.take("host", 4 * size), 4 * size, (size,), (1,), torch.int32, device)
        for i, size in enumerate(sizes)
    )


def _stress(tier: HostTier, steps: int, wrong: torch.Tensor) -> None:
    """Many transfers of all sizes; whatever a race could hand to somebody else is compared on the device."""
    slots = _slots([2**k + k for k in range(4, 19)] * 4)
    for step in range(steps):
        arena = Arena(slots, {"host": tier})
        leaving: list[torch.Tensor] = []
        for index, slot in enumerate(slots):
            leaving.append(slot.empty().fill_(1000 * step + index))
            arena.offload(index, leaving[index])
            if index >= 3:
                arena.settle(index - 3, leaving[index - 3])
                leaving[index - 3] = torch.empty(0)
                torch.empty_like(slots[index - 3].empty()).fill_(-1)  # has its memory next
        for index in range(len(slots) - 3, len(slots)):
            arena.settle(index, leaving[index])
        leaving.clear()
        coming = {len(slots) - 1: arena.reload(len(slots) - 1)}
        for index in reversed(range(len(slots))):
            if index:
                coming[index - 1] = arena.reload(index - 1)
            tensor = arena.arrive(index, coming.pop(index))
            wrong += (tensor != 1000 * step + index).sum()
            del tensor
        if step % 7 == 3:
            dangling = arena.reload(0)  # never arrives
            del dangling
        arena.close()
        torch.empty(slots[0].shape, dtype=torch.int32, device="cuda").fill_(-1)


def test_no_race_under_stress_on_other_streams_and_in_two_threads() -> None:
    torch.use_deterministic_algorithms(False)  # which would fill what is empty
    tier, results, failed = host_tier(), list[torch.Tensor](), list[BaseException]()

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                wrong = torch.zeros((), dtype=torch.int64, device="cuda")
                _stress(tier, 60, wrong)
                results.append(wrong)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failed == []
    assert [int(each) for each in results] == [0, 0]


def test_moving_takes_no_device_memory_of_its_own() -> None:
    torch.use_deterministic_algorithms(False)
    tier, slots = host_tier(), _slots([2**18] * 4)
    for turn in range(2):  # the first one makes streams and the slab
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        arena = Arena(slots, {"host": tier})
        for index, slot in enumerate(slots):
            tensor = slot.empty().zero_()
            arena.offload(index, tensor)
            arena.settle(index, tensor)
            del tensor
        for index in range(4):
            arena.arrive(index, arena.reload(index))
        arena.close()
        peak = torch.cuda.max_memory_allocated() - before
        assert peak == slots[0].bytes or not turn
        assert torch.cuda.memory_allocated() == before


# -- the host ------------------------------------------------------------------------------------------------------


def test_pageable_memory_is_a_stated_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)
    tier = HostTier()

    def refuse(size: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(tier.streams, "pinned", refuse)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with pytest.warns(UserWarning, match="the host tier uses pageable memory"):
        _stress(tier, 3, wrong)
    assert int(wrong) == 0


def test_too_little_memory_of_the_host_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_host_bytes", lambda: 2**10)
    with pytest.raises(TierError, match="Nothing of this step has run"):
        Arena(_slots([2**20]), {"host": HostTier()})


def test_the_link_is_measured() -> None:
    link, source = measured_host_link(host_tier(), anew=True)
    assert source.startswith("measured here")
    assert 1e8 < link.out_bytes_per_second < 1e12
    assert 1e8 < link.in_bytes_per_second < 1e12
    assert 0 < link.latency_seconds < 1e-3
    assert link.capacity_bytes > 0


def test_calibrate_measures_the_link_of_the_card(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["calibrate", "--tiers", f"host,disk:{tmp_path}"])
    assert found.exit_code == 0, found.output
    assert f"measured here, on {torch.cuda.get_device_name()}" in found.stdout
    data = json.loads(CliRunner().invoke(app, ["calibrate", "--json", "--tiers", "host"]).stdout)
    assert 1e8 < data["links"]["host"]["out_bytes_per_second"] < 1e12


def test_a_model_on_the_cpu_is_still_refused() -> None:
    with pytest.raises(UsageError, match="the memory of a CPU is the host's"):
        ebbtide.fit(torch.nn.Linear(2, 2), "1GiB", tiers="host")
