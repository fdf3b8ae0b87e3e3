"""Costs for a captured program: measured on the device at hand, or by roofline for a catalogue machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from ebbtide.cost.cache import CostCache, device_context
from ebbtide.cost.call import Call
from ebbtide.cost.cuda_workspace import workspace_bytes
from ebbtide.cost.priced import Priced
from ebbtide.cost.profile import Cost, UnexpectedResult, profile_calls
from ebbtide.cost.roofline import roofline_seconds
from ebbtide.cost.scaled import Timed
from ebbtide.errors import CaptureError
from ebbtide.measurement.cpu_allocations import ProfilerActive
from ebbtide.step.machine import Machine, machine_named
from ebbtide.step.program import Program
from ebbtide.step.provenance import Costs

__all__ = [
    "costs_of",
    "is_measured",
    "is_measured_form",
    "known_workspace",
    "with_measured_costs",
    "with_roofline_costs",
]

_KNOWN: dict[str, dict[str, Cost]] = {}  # per cache file, what this process has read or measured
_TIMED: dict[str, Timed] = {}  # likewise, of the calls that this process has met
_one_at_a_time = threading.RLock()  # threads that measure would disturb each other, and measure the same


def with_measured_costs(program: Program, calls: Sequence[Call], device: str) -> Program:
    """``program`` with seconds, workspaces and kept storages measured on this device, once and cached on disk.

    On a CPU, a call that this process has met at another size has seconds by that one (``scaled``). What is beyond the
    number of calls that are timed at once, or takes more than the room that there is, has seconds by roofline;
    :func:`costs_of` tells. So has what is never run alone (``priced``), which says what it takes.

    Args:
        program: captured.
        calls: one per op.
        device: ``"cpu"`` or ``"cuda"``, where the step will run.

    Raises:
        CaptureError: if something has to be measured while a profiler is active, or if an op's result is laid out
            otherwise than torch says; names op and line.
    """
    cache = CostCache(device_context(device))
    known = _costs_in(cache)
    missing = [call for call in calls if call.signature not in known and not isinstance(call.target, Priced)]
    if missing:
        with _one_at_a_time:
            _measure(program, calls, device, known, cache)
    costs = [known.get(call.signature) or _estimate(call) for call in calls]
    if device == "cpu":
        timed = _TIMED.setdefault(str(cache.path), Timed())
        for call in {call.signature: call for call in calls}.values():
            if (cost := known.get(call.signature)) is not None and cost.timed and not cost.scaled:
                timed.note(call, cost.seconds)
    return _with_kept_bytes(program, costs).with_costs([c.seconds for c in costs], [c.workspace_bytes for c in costs])


def _measure(program: Program, calls: Sequence[Call], device: str, costs: dict[str, Cost], cache: CostCache) -> None:
    """Add to ``costs`` and to the cache what is not there, on a thread that has the measuring to itself."""
    missing = [call for call in calls if call.signature not in costs and not isinstance(call.target, Priced)]
    timed = _TIMED.get(str(cache.path), Timed())
    scaled = {call.signature: found for call in missing if (found := timed.seconds_of(call)) is not None}
    try:
        # The calls are those behind autocast: under the user's own they would be cast once more.
        with torch.autocast(device, enabled=False):
            measured = profile_calls(missing, device, scaled)
    except UnexpectedResult as error:
        raise _unexpected(program, calls, error) from error
    except ProfilerActive:
        raise CaptureError(
            "the ops of a new step are timed once, which is not possible while a profiler or ebbtide.measure is "
            "running",
            remedy="run the first step outside of it",
        ) from None
    costs.update(measured)
    cache.add({key: cost for key, cost in measured.items() if cost.timed and cost.steady and not cost.scaled})


def _forked() -> None:
    """In a child: whoever measured is not there."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()


os.register_at_fork(after_in_child=_forked)


def costs_of(calls: Sequence[Call], device: str) -> tuple[Costs, str]:
    """Where the costs of ``calls`` are from that :func:`with_measured_costs` gave, and in words what is estimated."""
    known = _costs_in(CostCache(device_context(device)))
    signatures = {call.signature for call in calls}
    estimated = sum(1 for each in signatures if each not in known or not known[each].timed)
    unsteady = sum(1 for each in signatures if each in known and not known[each].steady)
    scaled = sum(1 for each in signatures if each in known and known[each].scaled)
    if not estimated and unsteady:
        ops = f"{unsteady} of {len(signatures)} distinct ops"
        return Costs.MEASURED, f"the machine was busy: the seconds of {ops} are doubtful, and not kept"
    if not estimated and scaled:
        return Costs.MEASURED, f"the seconds of {scaled} of {len(signatures)} distinct ops are by those of other shapes"
    if not estimated:
        return Costs.MEASURED, ""
    return Costs.PARTLY, f"the seconds of {estimated} of {len(signatures)} distinct ops are by roofline"


def known_workspace(call: Call, device: str) -> int | None:
    """Bytes that ``call`` takes beyond its outputs here; ``None`` where nobody knows (:func:`is_measured`)."""
    found = _costs_in(CostCache(device_context(device))).get(call.signature)
    return None if found is None else found.workspace_bytes


def is_measured(call: Call, device: str) -> bool:
    """Whether the workspace of ``call`` is known here; what had no room to be tried has none in its costs."""
    return call.signature in _costs_in(CostCache(device_context(device)))


def _costs_in(cache: CostCache) -> dict[str, Cost]:
    key = str(cache.path)
    if key not in _KNOWN:
        _KNOWN[key] = cache.load()
    return _KNOWN[key]


def _estimate(call: Call) -> Cost:
    """For a call that cannot be tried alone, or does not fit beside what is resident: nor will it in the step."""
    taken = call.target.workspace_bytes(call.args) if isinstance(call.target, Priced) else 0
    return Cost(roofline_seconds(call, machine_named("cpu")), taken, timed=False)


def _with_kept_bytes(program: Program, costs: Sequence[Cost]) -> Program:
    """``program`` with every buffer at least as large as the storage that its kernel returns."""
    larger = {
        b: kept
        for op, cost in zip(program.ops, costs, strict=True)
        for b, kept in zip(op.outputs, cost.kept_bytes, strict=False)
        if kept > program.buffers[b].bytes
    }
    if not larger:
        return program
    buffers = tuple(
        replace(each, bytes=larger[b], whole=False) if b in larger else each for b, each in enumerate(program.buffers)
    )
    return replace(program, buffers=buffers)


def is_measured_form(program: Program, captured: Program) -> bool:
    """Whether ``program`` is ``captured`` after measuring, which enlarges the buffers of some ops and no other way."""
    if len(program.ops) != len(captured.ops) or len(program.buffers) != len(captured.buffers):
        return False
    if any(a.signature != b.signature for a, b in zip(program.ops, captured.ops, strict=True)):
        return False
    pairs = zip(captured.buffers, program.buffers, strict=True)
    buffers = tuple(replace(mine, bytes=max(mine.bytes, measured.bytes)) for mine, measured in pairs)
    return replace(captured, buffers=buffers).fingerprint == program.fingerprint


def _unexpected(program: Program, calls: Sequence[Call], error: UnexpectedResult) -> CaptureError:
    op = program.ops[[call.signature for call in calls].index(error.call.signature)]
    return CaptureError(
        f"{op} cannot be planned: {error.difference}",
        remedy=error.remedy
        or "if it is a custom op of yours, let its fake kernel (register_fake) describe what it returns; if it is "
        "one of torch's, pass it contiguous tensors (contiguous()) and report it",
        op=str(op),
        source=op.source,
    )


def with_roofline_costs(program: Program, calls: Sequence[Call], machine: Machine) -> Program:
    """``program`` with seconds by roofline on ``machine`` and, for CUDA, the workspaces that are known."""
    costs: dict[str, tuple[float, int]] = {}
    for call in calls:
        if call.signature not in costs:
            if isinstance(call.target, Priced):
                workspace = call.target.workspace_bytes(call.args)
            else:
                workspace = workspace_bytes(call, machine) if machine.device == "cuda" else 0
            costs[call.signature] = roofline_seconds(call, machine), workspace
    found = [costs[call.signature] for call in calls]
    return program.with_costs([seconds for seconds, _ in found], [workspace for _, workspace in found])
