"""On CUDA a planned step has the same bits, and its peak is within 1 % of the prediction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ebbtide
from ebbtide.lower.fingerprints import SCRATCH_BYTES_CUDA, _fingerprint_on_device, fingerprint
from ebbtide.lower.targets import read_state, replay
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.units import Budget
from ebbtide.zoo import GPTConfig, gpt, mlp_chain
from random_schedule import random_schedule, with_schedule


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that give the same bits twice; cuBLAS wants to be told through its environment."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def case_on_cuda(name: str, dropout: float) -> ebbtide.Case:
    if name == "mlp_chain":
        case = mlp_chain(4096, layers=12, width=256, dropout=dropout)
    else:
        case = gpt(8, GPTConfig(vocabulary=512, length=128, layers=4, width=256, heads=4, dropout=dropout))
    args = tuple(a.cuda() for a in case.args)
    return ebbtide.Case(case.model.cuda(), args, name=name)


@pytest.mark.parametrize("share", [0.6, 0.4, 0.2, 0.02])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["mlp_chain", "gpt"])
def test_planned_step_is_the_same_step(name: str, dropout: float, share: float) -> None:
    case = case_on_cuda(name, dropout)
    unplanned = ebbtide.plan(case.model, case.args, budget="1000%")
    smallest, _ = smallest_of(unplanned.program)
    above = int(smallest + share * (unplanned.baseline.above_bytes - smallest))
    plan = make_plan(
        unplanned.program,
        Budget(bytes=unplanned.resident_bytes + above),
        resident_bytes=unplanned.resident_bytes,
        options=PlanningOptions(effort=2_000, provenance=unplanned.provenance),
    )
    result = ebbtide.verify(case.model, case.args, {}, plan)
    assert result.differences == ()
    assert abs(result.prediction_error) <= 0.01
    assert result.measured_above_bytes <= 1.01 * result.budget_above_bytes


@pytest.mark.parametrize("seed", range(3))
def test_random_schedule_is_the_same_step(seed: int) -> None:
    case = case_on_cuda("gpt", 0.1)
    unplanned = ebbtide.plan(case.model, case.args, budget="1000%")
    plan = with_schedule(unplanned, random_schedule(unplanned.program, seed))
    result = ebbtide.verify(case.model, case.args, {}, plan)
    assert result.differences == ()
    assert abs(result.prediction_error) <= 0.01


def test_fitted_steps_train_within_the_budget() -> None:
    case = case_on_cuda("gpt", 0.1)
    unplanned = ebbtide.plan(case.model, case.args, budget="1000%")
    resident = torch.cuda.memory_allocated()
    gradients = sum(p.nbytes for p in case.model.parameters())
    smallest, _ = smallest_of(unplanned.program)
    above = int(smallest + 0.5 * (unplanned.baseline.above_bytes - smallest))
    budget = resident + gradients + above + SCRATCH_BYTES_CUDA + 2**16
    ebbtide.fit(case.model, budget)
    for _ in range(3):
        case.model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        case.model(*case.args).backward()
        assert torch.cuda.max_memory_allocated() <= 1.01 * budget
    step = ebbtide.step_of(case.model)
    assert step is not None
    assert step.verified_buffers > 0


def test_replay_draws_the_same_on_cuda() -> None:
    state = read_state("cuda")
    first = torch.rand(1000, device="cuda")
    torch.rand(10, device="cuda")
    now = torch.cuda.get_rng_state()
    again = replay("cuda", state, torch.rand, (1000,), {"device": "cuda"})
    assert torch.equal(first, again)
    assert torch.equal(torch.cuda.get_rng_state(), now)


@pytest.mark.parametrize("size", [1, 3, 4, 1023, 2**20 + 3, 2**22 + 1])
def test_device_fingerprint_sees_every_byte_and_its_place(size: int) -> None:
    data = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    expected = fingerprint(data)
    assert fingerprint(data.clone()) == expected
    for position in {0, size // 2, size - 1}:
        other = data.clone()
        other[position] ^= 1
        assert fingerprint(other) != expected


def test_device_fingerprint_is_that_of_the_same_bytes_on_cpu() -> None:
    data = torch.randn(100_003)
    storage = data.untyped_storage()
    assert fingerprint(data.cuda()) == _fingerprint_on_device(storage, storage.nbytes())


def test_device_fingerprint_stays_within_its_scratch() -> None:
    data = torch.randn(2**22, device="cuda")
    fingerprint(data)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fingerprint(data)
    assert torch.cuda.max_memory_allocated() - before <= SCRATCH_BYTES_CUDA
