"""The first call stays within the budget: finding out what a step costs is part of it. The oracle is the allocator's.

A counter of the process's allocations is compiled and preloaded into a child; where there is no compiler, the module
is skipped.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.cost import profile, profiling_budget
from ebbtide.cost.call import Call, TensorSpec
from ebbtide.cost.mapped import mapped
from ebbtide.cost.profile import profile_calls
from ebbtide.cost.profiling_budget import ProfilingBudget, profiling_within

TESTS = Path(__file__).resolve().parents[1]
NOISE = 128 * 2**10
"""What a first call leaves beside tensors: states of generators, oneDNN's and numba's tables (27 to 70 KiB seen)."""


class Wide(nn.Module):
    """Weights of 4 MiB each; activations of 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


class Frozen(Wide):
    """What is trained is small, so that nothing of the step is as large as a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


class Expanded(nn.Module):
    """A buffer that shows 16 MiB and has 256 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("scale", torch.ones(64).expand(65536, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.scale[: len(x)]).square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "weights larger than what is free": (Frozen, (16, 1024), False),
    "state of an optimizer": (Wide, (16, 1024), True),
    "an expanded buffer": (Expanded, (16, 64), False),
}


def first_call(name: str) -> dict[str, int]:
    """In a child with the counter: bytes of the budget and the peak of the first step above all that came before."""
    counter: Any = ctypes.CDLL(None)
    counter.allocation_level.restype = counter.allocation_peak.restype = ctypes.c_long
    make, shape, adam = CASES[name]
    model, x = make(), torch.randn(shape)
    optimizer = torch.optim.Adam(model.parameters()) if adam else None
    tensors = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in (*model.parameters(), x)}
    tensors.update({each.untyped_storage().data_ptr(): each.untyped_storage() for each in model.buffers()})
    before = counter.allocation_level() - sum(each.nbytes() for each in tensors.values())
    ebbtide.fit(model, "100%", optimizer=optimizer, options=ebbtide.Options(effort=100))
    counter.allocation_restart()
    model(x).backward()
    plan = ebbtide.plan_of(model)
    assert plan is not None
    return {"budget": plan.budget_bytes, "peak": counter.allocation_peak() - before}


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("no compiler for the counter of allocations")
    folder = tmp_path_factory.mktemp("counter")
    library = folder / "counter.so"
    source = TESTS / "allocation_counter.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    code = (
        "import json, torch; torch.set_num_threads(1); from engine.test_first_call import CASES, first_call; "
        "print(json.dumps({name: first_call(name) for name in CASES}))"
    )
    path = os.pathsep.join([str(TESTS), str(Path(ebbtide.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": path}
    environment["XDG_CACHE_HOME"] = str(folder)  # costs are measured there and then
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_the_first_step_keeps_its_budget(name: str, peaks: dict[str, dict[str, int]]) -> None:
    assert peaks[name]["peak"] <= peaks[name]["budget"] + NOISE


# -- where ops are tried out ----------------------------------------------------------------------------------

SIDE = 256
SQUARE = TensorSpec((SIDE, SIDE), (SIDE, 1), torch.float32, "cpu")
BYTES = SIDE * SIDE * 4
PRODUCT = Call(torch.ops.aten.mm.default, (SQUARE, SQUARE), {}, (SQUARE,), "mm")


def taken(call: Call, there: ProfilingBudget) -> int:
    with ebbtide.measure() as nothing:  # the window of a measurement is the profiler's, of which there is one
        pass
    assert nothing.above_bytes == 0
    made: list[int] = []
    with profiling_within(there), pytest.MonkeyPatch.context() as patch:

        def counted(made_for: Call) -> Any:
            with ebbtide.measure() as arguments:
                result = profiling_budget.arguments_for(made_for)
            made.append(arguments.above_bytes)
            return result

        patch.setattr(profile, "arguments_for", counted)
        costs = profile_calls([call], "cpu")
    return made[0] if costs else -1


def test_what_is_free_is_taken() -> None:
    assert taken(PRODUCT, ProfilingBudget()) == 2 * BYTES


def test_what_is_not_free_is_borrowed() -> None:
    one, other = torch.randn(SIDE * SIDE), torch.randn(SIDE, SIDE).t()
    before = one.clone(), other.clone()
    assert taken(PRODUCT, ProfilingBudget(2 * BYTES, [one, other])) == 0
    assert taken(PRODUCT, ProfilingBudget(2 * BYTES, [one])) == 0, "one may lend twice where there is no other"
    assert torch.equal(one, before[0])
    assert torch.equal(other, before[1])


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each file that operands lie in."""
    found: list[int] = []

    def counted(count: int, dtype: torch.dtype) -> torch.Tensor:
        found.append(count * dtype.itemsize)
        return mapped(count, dtype)

    monkeypatch.setattr(profiling_budget, "mapped", counted)
    return found


def test_only_memory_of_the_same_type_and_enough_of_it_is_borrowed(files: list[int]) -> None:
    lenders = [
        torch.randn(SIDE),
        torch.randn(SIDE, SIDE, dtype=torch.float64),
        torch.zeros(SIDE, SIDE, dtype=torch.int32),
    ]
    assert taken(PRODUCT, ProfilingBudget(BYTES, lenders)) == 0
    assert files[:2] == [BYTES, BYTES], "both lie in files of their own"
    files.clear()
    assert taken(PRODUCT, ProfilingBudget(BYTES, [*lenders, torch.randn(SIDE, SIDE)])) == 0
    assert not files


def test_what_is_written_to_borrows_nothing() -> None:
    call = Call(torch.ops.aten.add_.Tensor, (SQUARE, SQUARE), {}, (SQUARE,), "add_")
    weight = torch.ones(SIDE, SIDE)
    assert taken(call, ProfilingBudget(3 * BYTES, [weight])) == 2 * BYTES
    assert bool((weight == 1).all())


INTEGERS = TensorSpec((SIDE,), (1,), torch.int64, "cpu")
NEGATED = Call(torch.ops.aten.neg.default, (INTEGERS,), {}, (INTEGERS,), "neg")


def test_integers_that_do_not_fit_lie_in_files(files: list[int]) -> None:
    lender = torch.ones(SIDE, dtype=torch.int64)
    assert taken(NEGATED, ProfilingBudget(SIDE * 8, [lender])) == 0
    assert files[0] == SIDE * 8
    assert bool((lender == 1).all())


def test_integers_that_do_not_fit_are_estimated_where_no_file_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(count: int, dtype: torch.dtype) -> torch.Tensor:
        raise OSError("no space left on device")

    monkeypatch.setattr(profiling_budget, "mapped", full)
    there = ProfilingBudget(SIDE * 8, [torch.zeros(SIDE, dtype=torch.int64)])
    assert taken(NEGATED, there) == -1
    assert not there.knows_all
