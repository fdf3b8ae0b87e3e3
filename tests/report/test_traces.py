"""Files for other tools: played back event by event they give the simulator's bytes, and the tools take them."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plans import hybrid, recomputed
from test_page import ODD
from torch.cuda import _memory_viz  # the readers that the web page's Python side has

from ebbtide.report.plan import Plan
from ebbtide.report.records.course import planned_course
from ebbtide.report.traces.chrome import write_trace
from ebbtide.report.traces.snapshot import snapshot_of, write_snapshot

PLANS: dict[str, Callable[[], Plan]] = {
    "recomputed": lambda: recomputed(9),
    "hybrid": lambda: hybrid(9),
    **{name: lambda name=name: ODD[name] for name in ODD},
}


def played(snapshot: dict[str, Any]) -> tuple[int, int]:
    """The highest level of a snapshot's trace and the last, by its events alone; no block is handed out twice."""
    live: dict[int, int] = {}
    most = 0
    for event in snapshot["device_traces"][0]:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert all(address + size <= other or other + taken <= address for other, taken in live.items())
            live[address] = size
            most = max(most, sum(live.values()))
        elif event["action"] == "free_completed":
            assert live.pop(address) == size
    return most, sum(live.values())


@pytest.mark.parametrize("name", PLANS)
def test_a_snapshot_reaches_the_plans_peak(name: str) -> None:
    plan = PLANS[name]()
    snapshot = snapshot_of(plan)
    most, last = played(snapshot)
    assert most == plan.timeline.above_bytes
    step = snapshot["segments"][-1]
    assert step["allocated_size"] == last
    assert sum(segment["allocated_size"] for segment in snapshot["segments"]) == plan.resident_bytes + last


@pytest.mark.parametrize("name", ["recomputed", "hybrid", "empty", "one op"])
def test_torchs_readers_take_a_snapshot(name: str, tmp_path: Path) -> None:
    """The file as it was written, by every reader that torch has for one."""
    plan = PLANS[name]()
    snapshot = pickle.loads(plan.save_snapshot(tmp_path / "snapshot.pickle").read_bytes())
    assert "entries" in _memory_viz.trace(snapshot) or not snapshot["device_traces"][0]
    _memory_viz.segsum(snapshot)  # raises where blocks do not fill their segment
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert "Allocator State History" in _memory_viz.segment_plot(snapshot)
    _, last = played(snapshot)
    assert _active(_memory_viz.memory(snapshot, format_flamegraph=str)) == plan.resident_bytes + last
    assert _active(_memory_viz.segments(snapshot, format_flamegraph=str)) == plan.resident_bytes + last


def _active(stacks: str) -> int:
    """Bytes in use, as torch's readers write them for a flame graph: a stack a line, its bytes at the end."""
    return sum(int(line.rpartition(" ")[2]) for line in stacks.splitlines() if "active_allocated" in line)


def test_a_snapshot_is_plain_data_and_names_lines() -> None:
    stream = io.BytesIO()
    write_snapshot(recomputed(9), stream)
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(stream.getvalue())}
    assert opcodes.isdisjoint({"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "EXT1"})
    frames = [event["frames"][0] for event in snapshot_of(recomputed(9))["device_traces"][0]]
    assert {frame["filename"] for frame in frames} <= {"model.py", ""}
    assert all(isinstance(frame["line"], int) for frame in frames)
    assert any("blocks.3" in frame["name"] for frame in frames)


@pytest.mark.parametrize("name", PLANS)
def test_a_trace_has_every_moment_on_its_lane(name: str) -> None:
    plan = PLANS[name]()
    stream = io.StringIO()
    write_trace(plan, stream)
    events = json.loads(stream.getvalue())["traceEvents"]
    course = planned_course(plan)
    lanes = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    spans = [each for each in events if each["ph"] == "X" and each["pid"] == 1 and each["cat"] != "wait"]
    assert len(spans) == sum(1 for moment in course.moments if type(moment.action).__name__ != "Boundary")
    assert {lanes[1, each["tid"]] for each in spans} <= {moment.lane for moment in course.moments}
    levels = [
        each["args"]["above"] for each in events if each["ph"] == "C" and each["pid"] == 1 and "above" in each["args"]
    ]
    assert levels == [moment.bytes for moment in course.moments]
    ends = [each["ts"] + each["dur"] for each in spans]
    assert max(ends, default=0.0) == pytest.approx(1e6 * plan.step_seconds)


def test_transfers_and_tiers_are_in_a_trace() -> None:
    plan = hybrid(9)
    stream = io.StringIO()
    write_trace(plan, stream)
    events = json.loads(stream.getvalue())["traceEvents"]
    assert {each.get("cat") for each in events} >= {"offload", "reload", "forward", "backward", "wait"}
    held = [each["args"]["host"] for each in events if each["name"] == "bytes in the host"]
    assert held[-1] == plan.timeline.tier_bytes["host"][-1]
