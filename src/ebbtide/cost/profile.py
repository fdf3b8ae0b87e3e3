"""Seconds and workspace of each distinct op, measured by running it alone on this device.

1. Every distinct call (``Call.signature``) runs on synthetic inputs of the same shapes, strides and dtypes; no data
   dependence of bytes has been seen. Only one op's tensors exist at a time, in the room that there is (``room``).
2. Bytes are measured for every call: one run for the caches that a kernel's first use sets up, one that is recorded. A
   call whose seconds are another size's has these caches as a rule, and the second run only if the first leaves more
   than its results.
3. Seconds are the least of a number of runs that follows from the call alone, more for short ones. With one thread
   they are its own CPU time, with several time that goes by. Whoever shares the machine makes both longer, CPU time by
   up to two, for longer than all runs of a call take. So these are made a few at a time, in *rounds* over all calls:
   what disturbs one round has gone by another, or is there for all calls alike, and a plan depends on their ratios.
   The runs for bytes are the first two rounds of calls that take a hundredth of a second and more.
   Calls for which no two rounds agree on the least within :data:`_AGREES` are run again, a few rounds at most, if they
   are no short ones and no small part of a step: a quiet machine makes none of these. Where the rounds are still
   :data:`_DOUBTFUL` apart the seconds are *not steady*: they serve this process, and are taken anew by the next.
4. On CUDA seconds are the device's between two events, of runs that are all launched before the first begins: what the
   host takes to launch one is no part of them, as it is none of a step that keeps the device busy.
5. At most :data:`MOST_TIMED` calls are timed, those that move the most bytes. The seconds of the others are
   estimated: their roofline, times what the median of those that were timed took of theirs.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ebbtide.cost.call import Call, TensorSpec, same_strides
from ebbtide.cost.profiling_budget import NotProfiled, arguments_for
from ebbtide.cost.roofline import roofline_seconds, traffic_bytes
from ebbtide.measurement.card_peaks import allocated_peak, peaks_kept, reset_peak
from ebbtide.measurement.cpu_allocations import AllocationRecorder, peak_above
from ebbtide.measurement.step_record import give_way
from ebbtide.step.machine import machine_named
from ebbtide.torch_seams import trees as pytree
from ebbtide.torch_seams.cards import keep_waiting
from ebbtide.torch_seams.fake_tensors import without_modes
from ebbtide.units import format_bytes, format_count

__all__ = ["MOST_TIMED", "Cost", "UnexpectedResult", "profile_calls", "run_alone", "workspace_alone"]

MOST_TIMED = 256
"""Distinct calls that are timed at once. A 12-layer transformer has some 60, DenseNet-201 some 1,100."""
_RELEASE = ("aten", "prims")
"""Namespaces of ops whose memory goes with their results."""
# Definition 3: the least is what the op takes undisturbed, and machines are shared.
_AGREES, _DOUBTFUL = 0.1, 0.25
_MOST_AGAIN = 4
_SHORT_SECONDS = 1e-4
_SMALL_PART = 0.01
"""Of the seconds of all calls."""
_LEAST_RUNS = 3
"""Of calls that take a hundredth of a second and more, where those for caches and bytes do not agree."""
_MOST_RUNS = 30
_RUNS_OF_A_ROUND = 6
"""The first finds caches as another call has left them."""
_MOST_UNSEEN = 10_000
"""Runs that a clock may stand still for: milliseconds of calls of a microsecond."""
_WANTED_SECONDS = 0.02  # of the catalogue's idea of a CPU
_CUDA_RUNS = 5
_HEAD_START_SECONDS = 1e-3
_CUDA_GRANULARITY_BYTES = 512
_PATIENCE_SECONDS = 10.0
"""For what other threads measure of their steps: a forward, a backward, or what their code does between these."""


class UnexpectedResult(Exception):
    """An op's result has another shape or other strides than its fake one, so that nothing can be planned with it.

    Attributes:
        call: which one.
        difference: what is different.
        remedy: what would work, where that is known.
    """

    def __init__(self, call: Call, difference: str, remedy: str | None = None) -> None:
        super().__init__(f"{call.signature}: {difference}")
        self.call = call
        self.difference = difference
        self.remedy = remedy


class NotAlone(Exception):
    """A kernel refuses made-up numbers, as a factorisation does that wants a positive matrix."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call costs on one device.

    Attributes:
        seconds: one run, undisturbed.
        workspace_bytes: the peak while it runs beyond its outputs.
        kept_bytes: per output, bytes of the storage that it keeps, as the device's allocator takes them.
        timed: whether the seconds are measured, by definition 5.
        steady: whether they may be kept, by definition 3.
        scaled: whether they are those of another size (``scaled``).
    """

    seconds: float
    workspace_bytes: int
    kept_bytes: tuple[int, ...] = ()
    timed: bool = True
    steady: bool = True
    scaled: bool = False


def run_alone(call: Call) -> Any:
    """What ``call`` returns on synthetic inputs. The generators are left as they were.

    Raises:
        NotProfiled: if it takes more than there is.
    """
    with torch.random.fork_rng(), torch.no_grad():
        args, kwargs = arguments_for(call)
        return call.target(*args, **kwargs)


def _kept_bytes(call: Call, result: object, granularity_bytes: int) -> tuple[int, ...]:
    """Bytes of the storage that each output keeps; a kernel may return a part of a larger one.

    Raises:
        UnexpectedResult: if ``result`` does not lie in memory as the program says.
    """
    tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    if len(tensors) != len(call.outputs):
        raise UnexpectedResult(call, f"it returns {format_count(len(tensors), 'tensor')}, not {len(call.outputs)}")
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


def _first_run(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    try:
        return call.target(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise NotAlone(call.signature) from error


def _bytes_on_cpu(call: Call) -> Cost | None:
    """Without seconds; ``None`` if a run leaves more than its results."""
    args, kwargs = arguments_for(call)
    peak, left, result = _recorded(lambda: _first_run(call, args, kwargs))
    kept = _kept_bytes(call, result, 1)
    return None if left > sum(kept) else Cost(float("inf"), max(peak - sum(kept), 0), kept)


def _profile_on_cpu(call: Call, runs: int) -> tuple[Cost, list[float]]:
    """What ``call`` takes, and its seconds by round so far."""
    args, kwargs = arguments_for(call)
    begin = time.thread_time()
    result = _first_run(call, args, kwargs)
    first = time.thread_time() - begin
    kept = _kept_bytes(call, result, 1)
    del result
    begin = time.thread_time()
    peak = _recorded_on_cpu(call, args, kwargs)
    again = time.thread_time() - begin
    workspace = peak - sum(kept)
    if torch.get_num_threads() == 1 and runs == _LEAST_RUNS and min(first, again) > 0:
        rounds = [first, again]
    else:
        rounds = [_seconds_on_cpu(call, args, kwargs, min(runs, _RUNS_OF_A_ROUND))]
    return Cost(min(rounds), max(workspace, 0), kept), rounds


def _seconds_on_cpu(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], runs: int) -> float:
    """The least that one of ``runs`` took; infinity if there is none.

    Of several threads that is no more than all CPU time of the process: beyond it, they have waited for cores. A run
    that took no time at all is none: a guest's clock of CPU time stands still while it pays back what the host took.
    Where no run was seen, the call is made until the clock goes on, and the seconds are the mean.
    """
    alone = torch.get_num_threads() == 1
    used_until_now = time.thread_time if alone else time.process_time
    seconds = float("inf")
    for _ in range(runs):
        begin, used = time.perf_counter(), used_until_now()
        call.target(*args, **kwargs)
        used = used_until_now() - used
        if used > 0:
            seconds = min(seconds, used if alone else min(used, time.perf_counter() - begin))
    if seconds < float("inf") or not runs:
        return seconds
    begin = used_until_now()
    for made in range(1, _MOST_UNSEEN + 1):
        call.target(*args, **kwargs)
        if (used := used_until_now() - begin) > 0:
            return used / made
    return seconds


def _timed_in_rounds(
    costs: dict[str, Cost],
    least: Mapping[str, list[float]],
    calls: Sequence[Call],
    runs: Mapping[str, int],
    counts: Mapping[str, int],
) -> None:
    """Put into ``costs``, which have the first rounds, what later ones find (definition 3).

    Args:
        costs: by signature.
        least: of each round so far; later ones are added.
        calls: distinct ones.
        runs: how often each is run, if nothing disturbs that.
        counts: how often each is in the step.
    """
    timed = [call for call in calls if call.signature in least and costs[call.signature].seconds < float("inf")]

    def go_round(some: Iterable[Call], left: Callable[[int], int]) -> None:
        for call in some:
            if (count := left(runs[call.signature])) > 0:
                args, kwargs = arguments_for(call)
                least[call.signature].append(_seconds_on_cpu(call, args, kwargs, count))
                del args, kwargs

    once = [call for call in timed if len(least[call.signature]) == 1]
    go_round(once, lambda wanted: min(max(wanted - _RUNS_OF_A_ROUND, 1), _RUNS_OF_A_ROUND))
    for done in range(2 * _RUNS_OF_A_ROUND, _MOST_RUNS, _RUNS_OF_A_ROUND):
        go_round(timed, lambda wanted, done=done: min(wanted - done, _RUNS_OF_A_ROUND))
    for _ in range(_MOST_AGAIN):
        go_round(_apart(timed, least, counts, _AGREES), lambda wanted: min(max(wanted // 2, 1), _RUNS_OF_A_ROUND))
    unsteady = {call.signature for call in _apart(timed, least, counts, _DOUBTFUL)}
    for key, found in ((call.signature, least[call.signature]) for call in timed):
        costs[key] = replace(costs[key], seconds=min(found), steady=key not in unsteady)


def _apart(calls: Sequence[Call], least: Mapping[str, list[float]], counts: Mapping[str, int], by: float) -> list[Call]:
    """Those of ``calls`` of which no two rounds agree on the least, and that are neither short nor a small part."""
    part = _SMALL_PART * sum(counts[call.signature] * min(least[call.signature]) for call in calls)
    found: list[Call] = []
    for call in calls:
        first, second = sorted(least[call.signature])[:2]
        if first >= _SHORT_SECONDS and second > (1 + by) * first and counts[call.signature] * first > part:
            found.append(call)
    return found


def _profile_on_cuda(call: Call, runs: int) -> Cost:
    args, kwargs = arguments_for(call)
    kept = _kept_bytes(call, _first_run(call, args, kwargs), _CUDA_GRANULARITY_BYTES)
    peak, result = _peak_on_cuda(call, args, kwargs)
    workspace = peak - sum(kept)
    del result
    return Cost(_seconds_on_cuda(call, args, kwargs, runs and _CUDA_RUNS), max(workspace, 0), kept)


def _seconds_on_cuda(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], runs: int) -> float:
    """The least that one of ``runs`` took the device, definition 4; infinity if there is none."""
    if not runs:
        return float("inf")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    keep_waiting(_HEAD_START_SECONDS)
    events[0].record()
    for each in events[1:]:
        call.target(*args, **kwargs)
        each.record()
    events[-1].synchronize()
    return min(begin.elapsed_time(end) for begin, end in itertools.pairwise(events)) / 1e3


def profile_calls(
    calls: Iterable[Call], device: str, scaled_seconds: Mapping[str, float] | None = None
) -> dict[str, Cost]:
    """The cost of each distinct call by signature; left out are calls that have no room.

    The generators are left as they were.

    Args:
        calls: of a step; each signature is run once.
        device: ``"cpu"`` or ``"cuda"``.
        scaled_seconds: by signature, of calls that are not timed.

    Raises:
        ProfilerActive: on CPU, if a profiler is active already.
        UnexpectedResult: if a call returns something else than its fake outputs say.
    """
    calls = list(calls)
    distinct, counts = {call.signature: call for call in calls}, Counter(call.signature for call in calls)
    largest = sorted(distinct.values(), key=lambda call: (-traffic_bytes(call), call.signature))
    nominal = {call.signature: roofline_seconds(call, machine_named("cpu")) for call in largest}
    scaled = scaled_seconds or {}
    to_time = [call.signature for call in largest if call.signature not in scaled][:MOST_TIMED]
    runs = {call.signature: 0 for call in largest} | {each: _runs(nominal[each]) for each in to_time}
    costs: dict[str, Cost] = {}
    rounds: dict[str, list[float]] = {}

    def measured(call: Call) -> Cost:
        if device == "cuda":
            return _profile_on_cuda(call, runs[call.signature])
        if call.signature in scaled and _is_torchs(call) and (found := _bytes_on_cpu(call)) is not None:
            return found
        cost, rounds[call.signature] = _profile_on_cpu(call, runs[call.signature])
        return cost

    # Capture traces under a fake-tensor mode, which would otherwise answer in place of the kernels.
    kept = peaks_kept() if device == "cuda" else nullcontext()
    with kept, without_modes(), torch.random.fork_rng(), torch.no_grad():
        for call in largest:
            try:
                costs[call.signature] = measured(call)
            except NotAlone:  # what it takes besides is not known: room for copies of all its inputs
                costs[call.signature] = Cost(float("inf"), _input_bytes(call))
            except NotProfiled:
                continue
        if device == "cpu":
            _timed_in_rounds(costs, rounds, largest, runs, counts)
    for key in costs.keys() & scaled.keys():
        costs[key] = replace(costs[key], seconds=scaled[key], scaled=True)
    timed = {key: cost.seconds for key, cost in costs.items() if cost.seconds < float("inf")}
    scale = statistics.median([seconds / nominal[key] for key, seconds in timed.items()] or [1.0])
    for key in costs.keys() - timed.keys():
        costs[key] = replace(costs[key], seconds=scale * nominal[key], timed=False)
    return costs


def workspace_alone(call: Call, device: str) -> int:
    """What one call takes while it runs besides what it returns; 0 where it cannot be run alone, or has no room.

    Args:
        call: any, also one that writes to its arguments.
        device: ``"cpu"`` or ``"cuda"``.
    """
    kept = peaks_kept() if device == "cuda" else nullcontext()
    with kept, without_modes(), torch.random.fork_rng(), torch.no_grad():
        try:
            args, kwargs = arguments_for(call)
            _first_run(call, args, kwargs)
            given = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
            peak, result = (_peak_on_cuda if device == "cuda" else _peak_on_cpu)(call, args, kwargs)
        except NotAlone:
            return _input_bytes(call)
        except (NotProfiled, RuntimeError):  # on CPU the user's own profiler may be active
            return 0
        made = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in _tensors(result)}
        return max(0, peak - sum(size for where, size in made.items() if where not in given))


def _recorded(run: Callable[[], object]) -> tuple[int, int, object]:
    """The peak of what ``run`` allocates, what of that lives when it has returned, and what it returns."""
    recorder = AllocationRecorder()
    give_way()
    recorder.start(_PATIENCE_SECONDS)
    try:
        result = run()
    finally:
        events = recorder.stop()
    return peak_above(events), sum(recorder.live.values()), result


def _peak_on_cpu(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, object]:
    peak, _, result = _recorded(lambda: call.target(*args, **kwargs))
    return peak, result


def _is_torchs(call: Call) -> bool:
    return getattr(call.target, "namespace", "aten") in _RELEASE


def _recorded_on_cpu(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The peak of one run.

    Raises:
        UnexpectedResult: for an op of somebody's own that still has memory of the run when nobody has its result any
            more, with the bytes: no plan could count it.
    """

    def run() -> None:
        call.target(*args, **kwargs)

    peak, left, _ = _recorded(run)
    if left and not _is_torchs(call):
        raise UnexpectedResult(
            call,
            f"{format_bytes(left)} of a run are in use when its result is not any more, until Python's garbage "
            "collection finds them",
            "let the op keep nothing: objects that refer to each other hold the tensors that they hold (Triton's "
            "interpreter, TRITON_INTERPRET=1, leaves such ones behind), and gc.collect() at the op's end frees them",
        )
    return peak


def _peak_on_cuda(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, object]:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    reset_peak()
    result = call.target(*args, **kwargs)
    torch.cuda.synchronize()
    return allocated_peak() - before, result


def _tensors(values: object) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]


def _input_bytes(call: Call) -> int:
    specs = pytree.tree_leaves((call.args, call.kwargs))
    return sum(each.extent * each.dtype.itemsize for each in specs if isinstance(each, TensorSpec))


def _runs(seconds: float) -> int:
    """How often a call is timed that takes about so many seconds (definition 3)."""
    return min(max(round(_WANTED_SECONDS / seconds), _LEAST_RUNS), _MOST_RUNS)
