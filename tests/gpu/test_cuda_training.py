"""On a card a fitted model keeps its budget from the first call on, and its bits, however it is trained."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch

import ebbtide
from device_steps import EFFORT, MODELS, Way, case_of, compared, deterministic, train, workable

WAYS = {
    "plain": Way(),
    "bf16 autocast": Way(autocast=torch.bfloat16),
    "f16 autocast with a GradScaler": Way(autocast=torch.float16, scaler=True),
    "GradScaler": Way(scaler=True),
}
PREDICTION = 0.01  # DESIGN 7: the gate on the peak, on CUDA


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with deterministic():
        yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_bits_budget_and_prediction(name: str, way: str) -> None:
    """Dropout is replayed from Philox's offsets, running statistics are updated once, and every step fits."""
    case = case_of(name, "cuda", large=True)
    eager, fitted, budget = compared(case, WAYS[way])
    assert fitted.same_as(eager)
    assert max(fitted.peaks) <= budget, "the first call counts as well"
    plan = ebbtide.plan_of(case.model)
    assert plan is not None
    assert plan.overhead > 0, "nothing is recomputed: the budget tests nothing"
    assert plan.predicted_peak_bytes == pytest.approx(max(fitted.peaks[2:]), rel=PREDICTION)


def test_a_stream_of_the_users_own() -> None:
    stream = torch.cuda.Stream()

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)

    eager, fitted, budget = compared(case_of("gpt", "cuda", large=True), Way(around=around))
    assert fitted.same_as(eager)
    assert max(fitted.peaks) <= budget


def test_two_fitted_models_in_turns() -> None:
    """A generator and a discriminator, say: each has its budget, in which the other's parameters are resident."""
    cases = [case_of(name, "cuda", large=True) for name in ("gpt", "chain")]
    plain = [ebbtide.Case(copy.deepcopy(case.model), case.args) for case in cases]
    expected = [train(case, Way()) for case in plain]
    del plain
    budgets = [workable(case, Way(), 0.5) for case in cases]
    for case, budget in zip(cases, budgets, strict=True):
        gradients = sum(p.nbytes for other in cases for p in other.model.parameters())
        ebbtide.fit(case.model, budget + gradients, options=ebbtide.Options(effort=EFFORT))
    found = [train(case, Way()) for case in cases]
    for one, other in zip(found, expected, strict=True):
        assert one.same_as(other)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_the_second_card_is_planned_there() -> None:
    assert torch.cuda.current_device() == 0
    before = torch.cuda.max_memory_allocated(0)
    case = case_of("gpt", "cuda:1", large=True)
    eager, fitted, budget = compared(case, Way())
    assert fitted.same_as(eager)
    assert max(fitted.peaks) <= budget
    assert torch.cuda.max_memory_allocated(0) == before, "nothing was allocated on the current device"


def test_it_fits_where_eager_does_not() -> None:
    """The allocator itself refuses more than the budget (and its segments' rounding): eager runs out of memory."""
    case = case_of("chain", "cuda", large=True)
    plain = copy.deepcopy(case.model)
    budget = workable(case, Way(), 0.3)
    total = torch.cuda.get_device_properties(0).total_memory
    room = 48 * 2**20  # blocks are cut from segments of 2 and 20 MiB; cuBLAS holds its workspaces
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((budget + room) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            train(ebbtide.Case(plain, case.args), Way(), steps=1)
        plain.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        ebbtide.fit(case.model, budget, options=ebbtide.Options(effort=EFFORT))
        found = train(case, Way())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert max(found.peaks) <= budget
    step = ebbtide.step_of(case.model)
    assert step is not None
    assert step.reserved is not None
    assert step.reserved.allocated_bytes <= step.reserved.reserved_bytes <= budget + room


def test_a_budget_that_the_card_does_not_have_is_warned_of() -> None:
    case = case_of("chain", "cuda", large=False)
    with pytest.warns(UserWarning, match="is more than this process can have of cuda:0"):
        ebbtide.fit(case.model, 2 * torch.cuda.get_device_properties(0).total_memory)
