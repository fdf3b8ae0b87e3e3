"""Seconds and workspace of each distinct op, measured by running it alone on this device.

Every distinct call (``Call.signature``) runs on synthetic inputs of the same shapes, strides and dtypes: floats
are uniform, integers zero, booleans true; no data dependence of bytes has been seen. A call that refuses them gets ones
for integers, or is estimated. Only one op's tensors exist at a time, so profiling stays under any budget that the step
itself can meet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ebbflow.cost.call import Call, TensorSpec, same_strides
from ebbflow.cost.roofline import roofline_seconds
from ebbflow.measurement.cpu_allocations import AllocationRecorder
from ebbflow.measurement.peak import peak_above
from ebbflow.step.machine import machine_named
from ebbflow.torch_seams import trees as pytree
from ebbflow.torch_seams.fake_tensors import without_modes

__all__ = ["Cost", "UnexpectedResult", "profile_calls", "run_alone"]

# Timing takes the least of at least _LEAST_RUNS runs, more of them for short ops until _WANTED_SECONDS are spent:
# the least is what the op takes undisturbed, and machines are shared.
_LEAST_RUNS = 3
_MOST_RUNS = 30
_WANTED_SECONDS = 0.02
_CUDA_GRANULARITY_BYTES = 512


class UnexpectedResult(Exception):
    """An op's result has another shape or other strides than its fake one, so that nothing can be planned with it.

    Attributes:
        call: which one.
        difference: what is different.
    """

    def __init__(self, call: Call, difference: str) -> None:
        super().__init__(f"{call.signature}: {difference}")
        self.call = call
        self.difference = difference


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call costs on one device.

    Attributes:
        seconds: one run, undisturbed.
        workspace_bytes: the peak while it runs beyond its outputs.
        kept_bytes: per output, bytes of the storage that it keeps, as the device's allocator takes them.
    """

    seconds: float
    workspace_bytes: int
    kept_bytes: tuple[int, ...] = ()


def _synthetic(spec: TensorSpec, integer: int) -> torch.Tensor:
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        base = torch.rand(spec.extent, dtype=torch.float32, device=spec.device).to(spec.dtype)
    elif spec.dtype is torch.bool:
        base = torch.ones(spec.extent, dtype=spec.dtype, device=spec.device)
    else:
        base = torch.full((spec.extent,), integer, dtype=spec.dtype, device=spec.device)
    tensor = base.as_strided(spec.shape, spec.stride)
    if "conj" in spec.lazy:
        tensor = tensor.conj()
    return torch.ops.aten._neg_view.default(tensor) if "neg" in spec.lazy else tensor


def _arguments(call: Call, integer: int = 0) -> tuple[Sequence[Any], dict[str, Any]]:
    def make(value: object) -> object:
        return _synthetic(value, integer) if isinstance(value, TensorSpec) else value

    args, kwargs = pytree.tree_map(make, (call.args, call.kwargs), is_leaf=lambda v: isinstance(v, TensorSpec))
    return args, kwargs


def run_alone(call: Call) -> Any:
    """What ``call`` returns on synthetic inputs. The generators are left as they were."""
    with torch.random.fork_rng(), torch.no_grad():
        args, kwargs = _arguments(call)
        return call.target(*args, **kwargs)


def _kept_bytes(call: Call, result: object, granularity_bytes: int) -> tuple[int, ...]:
    """Bytes of the storage that each output keeps; a kernel may return a part of a larger one.

    Raises:
        UnexpectedResult: if ``result`` does not lie in memory as the program says.
    """
    tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    if len(tensors) != len(call.outputs):
        raise UnexpectedResult(call, f"it returns {len(tensors)} tensors, not {len(call.outputs)}")
    kept: list[int] = []
    for tensor, spec in zip(tensors, call.outputs, strict=True):
        if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
            found = TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, spec.device)
            raise UnexpectedResult(call, f"it returns {found}, not {spec}")
        if not same_strides(tensor.shape, tensor.stride(), spec.stride):
            raise UnexpectedResult(call, f"it returns strides {list(tensor.stride())}, not {list(spec.stride)}")
        size = max(tensor.untyped_storage().nbytes(), spec.extent * spec.dtype.itemsize)
        kept.append(-(-size // granularity_bytes) * granularity_bytes)
    return tuple(kept)


def _profile_on_cpu(call: Call, integer: int = 0) -> Cost:
    args, kwargs = _arguments(call, integer)
    # The first use of a kernel sets up caches that later runs do not pay for.
    kept = _kept_bytes(call, call.target(*args, **kwargs), 1)
    recorder = AllocationRecorder()
    recorder.start()
    result = call.target(*args, **kwargs)
    events = recorder.stop()
    workspace = peak_above(events) - sum(kept)
    del result
    return Cost(_least_seconds(lambda: call.target(*args, **kwargs)), max(workspace, 0), kept)


def _least_seconds(run: Callable[[], object]) -> float:
    # With one thread the op's own CPU time is what counts: it does not see who else uses the machine.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = float("inf")
    begin = time.perf_counter()
    for count in range(_MOST_RUNS):
        start = clock()
        run()
        best = min(best, clock() - start)
        if count + 1 >= _LEAST_RUNS and time.perf_counter() - begin > _WANTED_SECONDS:
            break
    return best


def _profile_on_cuda(call: Call) -> Cost:
    args, kwargs = _arguments(call)
    kept = _kept_bytes(call, call.target(*args, **kwargs), _CUDA_GRANULARITY_BYTES)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call.target(*args, **kwargs)
    torch.cuda.synchronize()
    workspace = torch.cuda.max_memory_allocated() - before - sum(kept)
    del result
    best = float("inf")
    for _ in range(_LEAST_RUNS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call.target(*args, **kwargs)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return Cost(best, max(workspace, 0), kept)


def _of_ones(call: Call, device: str) -> Cost | None:
    """The cost with ones for integers, as pivots of LAPACK begin with; ``None`` if they are refused as well.

    On a card a wrong index ends the process' use of it, so nothing else than zeros is tried there.
    """
    try:
        return _profile_on_cpu(call, 1) if device == "cpu" else None
    except Exception:
        return None


def estimated(call: Call) -> Cost:
    """The cost of a call that refuses made-up inputs: seconds by roofline, and room for copies of all its inputs."""
    specs = pytree.tree_leaves((call.args, call.kwargs))
    copies = sum(each.extent * each.dtype.itemsize for each in specs if isinstance(each, TensorSpec))
    return Cost(roofline_seconds(call, machine_named("cpu")), copies)


def profile_calls(calls: Iterable[Call], device: str) -> dict[str, Cost]:
    """The cost of each distinct call by signature. The generators are left as they were.

    Args:
        calls: any number, each signature is run once.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        RuntimeError: on CPU, if a profiler is active already.
        UnexpectedResult: if a call returns something else than its fake outputs say.
    """
    costs: dict[str, Cost] = {}
    measure_one = _profile_on_cuda if device == "cuda" else _profile_on_cpu
    # Capture traces under a fake-tensor mode, which would otherwise answer in place of the kernels.
    with without_modes(), torch.random.fork_rng(), torch.no_grad():
        for call in calls:
            if call.signature not in costs:
                try:
                    costs[call.signature] = measure_one(call)
                except UnexpectedResult:
                    raise
                except Exception:
                    costs[call.signature] = _of_ones(call, device) or estimated(call)
    return costs
