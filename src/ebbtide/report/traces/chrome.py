"""A plan's timeline as a Chrome trace: lanes as threads, bytes as counters; Perfetto and chrome://tracing open it.

The format is Google's "Trace Event Format". Times are microseconds from the step's start, as the plan predicts them.
The planned step is one process, the unplanned one another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

from ebbtide.report.records.course import Course, Moment, planned_course, unplanned_course
from ebbtide.step.plan import PlanRecord
from ebbtide.step.program import Program
from ebbtide.step.schedule import Boundary, Compute, Offload, Reload

__all__ = ["write_trace"]

_US = 1e6  # per second


def write_trace(plan: PlanRecord, stream: TextIO) -> None:
    """Write ``plan`` to ``stream`` as one JSON object."""
    planned = planned_course(plan)
    events = [
        *_process(1, "planned", plan, planned),
        *_tiers(1, plan),
        *_process(2, "unplanned", plan, unplanned_course(plan)),
    ]
    about = {"case": plan.case, "planner": plan.planner, "budget_bytes": plan.budget_bytes, "measured": False}
    json.dump({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, stream, separators=(",", ":"))


def _process(pid: int, name: str, plan: PlanRecord, course: Course) -> Iterator[dict[str, Any]]:
    lanes = list(dict.fromkeys(["compute", *(moment.lane for moment in course.moments)]))
    yield _named("process_name", pid, 0, f"{plan.case}, {name}")
    for tid, lane in enumerate(lanes):
        yield _named("thread_name", pid, tid, lane)
    now = 0.0
    for moment in course.moments:
        if moment.wait_seconds > 0:
            yield _span("wait for a transfer", "wait", pid, 0, moment.begin_seconds - moment.wait_seconds, moment)
        yield _event(plan.program, pid, lanes.index(moment.lane), moment)
        # Transfers allocate when they are issued, which is when the compute lane stands there.
        yield _counter("bytes", pid, now, {"resident": plan.resident_bytes, "above": moment.bytes})
        if moment.lane == "compute":
            now = moment.end_seconds


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _counter(name: str, pid: int, seconds: float, values: dict[str, int]) -> dict[str, Any]:
    return {"name": name, "ph": "C", "pid": pid, "tid": 0, "ts": seconds * _US, "args": values}


def _span(name: str, kind: str, pid: int, tid: int, begin: float, moment: Moment) -> dict[str, Any]:
    end = moment.begin_seconds if kind == "wait" else moment.end_seconds
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": begin * _US,
        "dur": max(end - begin, 0.0) * _US,
    }


def _event(program: Program, pid: int, tid: int, moment: Moment) -> dict[str, Any]:
    match moment.action:
        case Compute(op):
            made = program.ops[op]
            kind = "again" if moment.again else "forward" if op < program.boundary else "backward"
            details = {"target": made.target, "module": made.module, "line": made.source, "bytes": moment.bytes}
            event = _span(made.name, kind, pid, tid, moment.begin_seconds, moment)
        case Offload(buffer, tier):
            details = {"bytes": program.buffers[buffer].bytes, "tier": tier}
            event = _span(f"{program.buffers[buffer].name} out", "offload", pid, tid, moment.begin_seconds, moment)
        case Reload(buffer):
            details = {"bytes": program.buffers[buffer].bytes}
            event = _span(f"{program.buffers[buffer].name} back", "reload", pid, tid, moment.begin_seconds, moment)
        case Boundary():
            instant = {"name": "boundary", "ph": "i", "s": "p", "pid": pid, "tid": tid}
            return {**instant, "ts": moment.begin_seconds * _US, "args": {"bytes": moment.bytes}}
    return {**event, "args": details}


def _tiers(pid: int, plan: PlanRecord) -> Iterator[dict[str, Any]]:
    """Bytes in slower memory, where they change."""
    timeline = plan.timeline
    for tier, held in timeline.tier_bytes.items():
        last = 0
        for index, size in enumerate(held.tolist()):
            if size != last:
                yield _counter(f"bytes in the {tier}", pid, float(timeline.start_seconds[index]), {tier: size})
            last = size
