"""What is said of a card's allocator, with the card's answers made up; ``tests/gpu`` asks a real one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import ebbtide
from ebbtide.engine.executable import Executable
from ebbtide.engine.fitted_class import FITTED
from ebbtide.engine.reserve import most_unsplit_bytes, unsplit_bytes
from ebbtide.errors import BudgetExceeded, UsageError
from ebbtide.measurement import reserved
from ebbtide.measurement.peak import StepGauge
from ebbtide.measurement.reserved import Reserved, too_large_for_the_card
from ebbtide.step.machine import machine_named
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.zoo import mlp_chain

GIB = 2**30


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A card of 80 GiB that holds every model, with so much free and so much reserved by this process."""

    def make(free: int, own: int) -> None:
        monkeypatch.setattr(reserved, "cuda_index_of", lambda roots: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: own)

    return make


def test_a_budget_above_what_the_card_has_for_us_is_warned_of(card: Callable[..., None]) -> None:
    card(free=10 * GIB, own=2 * GIB)
    model = torch.nn.Linear(4, 4)
    with pytest.warns(UserWarning, match=r"12.00 GiB or less.*or end what else runs there") as said:
        ebbtide.fit(model, "12.5GiB")
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ebbtide.set_budget(model, "12GiB")
        ebbtide.set_budget(model, "60%")
    with pytest.warns(UserWarning, match="of 80.00 GiB it holds 2.00 GiB and 10.00 GiB are free"):
        ebbtide.set_budget(model, "13GiB")


def test_what_the_card_has_is_a_budget(card: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    card(free=10 * GIB, own=2 * GIB)
    model = ebbtide.fit(torch.nn.Linear(4, 4))
    assert FITTED[model].request.budget.bytes == int(12 * GIB * 0.95)
    assert "the budget is 11.39 GiB" in caplog.text
    ebbtide.set_budget(model, "1GiB")
    ebbtide.set_budget(model, "auto")
    assert FITTED[model].request.budget.bytes == int(12 * GIB * 0.95)


def test_a_cpu_has_no_budget_of_its_own_and_a_machine_of_the_catalogue_has() -> None:
    with pytest.raises(UsageError, match='give a budget: bytes, budget="8GiB"'):
        ebbtide.fit(torch.nn.Linear(4, 4))
    case = mlp_chain(8, layers=2)
    plan = ebbtide.plan(case.model, case.args, machine="t4-16gb")
    assert plan.budget_bytes == machine_named("t4-16gb").usable_bytes
    with pytest.raises(UsageError, match="give a budget"):
        ebbtide.plan(case.model, case.args)
    found = ebbtide.max_batch(
        lambda batch: mlp_chain(batch, layers=2, width=4096), machine="t4-16gb", options=ebbtide.Options(effort=10)
    )
    assert found.plan.budget_bytes == machine_named("t4-16gb").usable_bytes


def test_on_a_cpu_nothing_is_asked() -> None:
    assert too_large_for_the_card([torch.nn.Linear(2, 2)], 2**62) == ""


def test_fragments_are_reported_and_advised_on_where_they_are_much() -> None:
    seen = Reserved(allocated_bytes=10 * GIB, reserved_bytes=16 * GIB, fragment_bytes=4 * GIB)
    assert seen.fragmentation == 0.25
    assert seen.advice(14 * GIB) == ""
    assert "expandable_segments:True" in seen.advice(10 * GIB)
    roomy = Reserved(10 * GIB, 16 * GIB, 4 * GIB, free_bytes=5 * GIB)
    assert roomy.advice(10 * GIB) == "", "the card has room for the pieces too"
    assert "4.00 GiB in pieces beside the 10.00 GiB in use (16.00 GiB reserved in all)" in seen.advice(10 * GIB)
    assert Reserved(0, 0, 0).fragmentation == 0.0


def test_a_step_on_a_card_is_gauged_once_over_both_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    levels: dict[str, Any] = {"memory_allocated": 3 * GIB, "max_memory_allocated": 8 * GIB, "max_memory_reserved": GIB}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    for name, level in levels.items():
        monkeypatch.setattr(torch.cuda, name, lambda level=level: level)
    stats = {"inactive_split_bytes.all.peak": 7, "requested_bytes.all.peak": 6 * GIB, "requested_bytes.all.current": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * GIB, 80 * GIB))
    gauge = StepGauge("cuda")
    for _ in range(2):
        gauge.begin()
        gauge.end()
    assert calls == ["reset"]
    assert gauge.above_bytes == 5 * GIB
    assert gauge.requested_above_bytes == 6 * GIB - 2
    assert gauge.reserved == Reserved(8 * GIB, GIB, 7, 2 * GIB, 6 * GIB)


def test_on_a_cpu_a_step_reserves_nothing() -> None:
    model = ebbtide.fit(torch.nn.Linear(64, 64), "100%", options=ebbtide.Options(effort=10))
    for _ in range(2):
        model(torch.randn(32, 64)).sum().backward()
    step = ebbtide.step_of(model)
    assert step is not None
    assert step.measured_above_bytes is not None
    assert step.reserved is None


# -- blocks that are larger than asked for -----------------------------------------------------------------------------


@pytest.fixture
def executable() -> Executable:
    """Of a step whose first layers make tensors of 2 MiB, as on a card with room in its budget for some of that."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()]
    model = ebbtide.fit(torch.nn.Sequential(*layers), "100%", progress=None, options=ebbtide.Options(effort=10))
    model(torch.randn(1024, 128)).sum().backward()
    step = ebbtide.step_of(model)
    assert step is not None
    (found,) = step.executables
    return replace(found, code=replace(found.code, device="cuda"))


def gauged(above_bytes: int, requested_above_bytes: int | None = None) -> StepGauge:
    gauge = StepGauge("cpu")
    gauge.above_bytes, gauge.requested_above_bytes = above_bytes, requested_above_bytes
    return gauge


def test_little_is_kept_free_for_larger_blocks_and_none_where_segments_grow(
    executable: Executable, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = executable.plan.program
    large = sum(each.bytes > 2**20 for each in program.buffers)
    assert large >= 3
    assert most_unsplit_bytes(program) == large * 2**20
    assert unsplit_bytes(program) == int(0.005 * unplanned_bytes(program))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:64, expandable_segments: True")
            assert most_unsplit_bytes(program) == unsplit_bytes(program) == 0


@pytest.mark.parametrize("tells", [False, True])
def test_blocks_larger_than_foreseen_are_said_and_kept_free_from_then_on(executable: Executable, tells: bool) -> None:
    plan = executable.plan
    over = plan.budget_bytes - plan.predicted_peak_bytes + 2**16
    requested = plan.timeline.above_bytes - 512 if tells else None
    with pytest.warns(UserWarning, match=r"its budget is .*kept free from the next step on.*expandable_segments:True"):
        executable.hold_against(gauged(plan.timeline.above_bytes + over, requested))
    assert executable.measured.unsplit_bytes == over
    assert plan.resident_bytes + plan.timeline.above_bytes + executable.measured.unsplit_bytes > plan.budget_bytes, (
        "planned anew"
    )


def test_what_was_asked_for_is_not_taken_for_larger_blocks(executable: Executable) -> None:
    """An op that takes more than it is priced at, by less than larger blocks may take."""
    plan = executable.plan
    above = plan.timeline.above_bytes + plan.budget_bytes - plan.predicted_peak_bytes + 2**16
    assert 2**16 < most_unsplit_bytes(plan.program)
    with pytest.raises(BudgetExceeded, match="report the op"):
        executable.hold_against(gauged(above, above - 4096))


def test_what_no_block_explains_is_over_the_budget(executable: Executable) -> None:
    plan = executable.plan
    most = most_unsplit_bytes(plan.program)
    with pytest.raises(BudgetExceeded, match="report the op"):
        executable.hold_against(
            gauged(plan.timeline.above_bytes + plan.budget_bytes - plan.predicted_peak_bytes + most + 1)
        )
