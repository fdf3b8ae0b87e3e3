"""A plan's timeline as a PyTorch memory snapshot, which https://docs.pytorch.org/memory_viz opens.

What ``torch.cuda.memory._dump_snapshot`` writes of a run, this writes of a plan: a pickle of lists and dicts of numbers
and texts. It is written only; nothing here reads one.

1. Each stay of a buffer (``report.records.course``) is one allocation, with its op, module and line as its frame. What
   a moment takes besides is one more, freed at once: so the level after each event never exceeds the simulator's, and
   reaches it.
2. The resident part is one block that is there from the start.
3. Addresses are made up. A range that was freed is taken again by what has the same size.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from typing import Any, BinaryIO

from ebbtide.report.records.course import Course, planned_course
from ebbtide.step.plan import PlanRecord
from ebbtide.step.program import Op, Program
from ebbtide.step.schedule import Compute

__all__ = ["snapshot_of", "write_snapshot"]

_RESIDENT, _STEP = 1 << 44, 1 << 45  # where the two segments begin: apart, whatever their sizes
_PROTOCOL = 4  # of pickle: readable by every Python that runs a torch of today
_US = 1e6


def write_snapshot(plan: PlanRecord, stream: BinaryIO) -> None:
    """Write the snapshot of ``plan`` to ``stream``."""
    pickle.dump(snapshot_of(plan), stream, protocol=_PROTOCOL)


def snapshot_of(plan: PlanRecord) -> dict[str, Any]:
    """The snapshot of ``plan`` as plain data."""
    program, course = plan.program, planned_course(plan)
    pool = _Pool()
    first: dict[int, list[int]] = defaultdict(list)
    last: dict[int, list[int]] = defaultdict(list)
    for index, stay in enumerate(course.stays):
        if program.buffers[stay.buffer].bytes:
            first[stay.first].append(index)
            last[stay.last].append(index)
    for moment, each in enumerate(course.moments):
        pool.now = round(each.begin_seconds * _US) if each.begin_seconds < 1e9 else moment
        for index in first[moment]:
            buffer = course.stays[index].buffer
            pool.take(index, program.buffers[buffer].bytes, [_frame(program, buffer)])
        rest = each.bytes - pool.live
        if rest > 0:
            pool.take(-1, rest, [_rest(program, course, moment)])
            pool.give(-1)
        if moment < len(course.moments) - 1:
            for index in last[moment]:
                pool.give(index)
    segments = [pool.segment()]
    if plan.resident_bytes:
        frames = [{"filename": "", "line": 0, "name": "resident before the step"}]
        segments.insert(0, _segment(_RESIDENT, [_block(_RESIDENT, plan.resident_bytes, frames)]))
    return {"segments": segments, "device_traces": [pool.events]}


class _Pool:
    """Addresses and events of one segment: definitions 1 and 3."""

    def __init__(self) -> None:
        self.now = 0
        self.live = 0
        self.events: list[dict[str, Any]] = []
        self._end = _STEP
        self._free: dict[int, list[int]] = defaultdict(list)
        self._blocks: dict[int, tuple[int, int, list[dict[str, Any]]]] = {}

    def take(self, key: int, size: int, frames: list[dict[str, Any]]) -> None:
        """Allocate."""
        if self._free[size]:
            address = self._free[size].pop()
        else:
            address, self._end = self._end, self._end + size
        self._blocks[key] = address, size, frames
        self.live += size
        self._note("alloc", address, size, frames)

    def give(self, key: int) -> None:
        """Free."""
        address, size, frames = self._blocks.pop(key)
        self._free[size].append(address)
        self.live -= size
        self._note("free_requested", address, size, frames)
        self._note("free_completed", address, size, frames)

    def _note(self, action: str, address: int, size: int, frames: list[dict[str, Any]]) -> None:
        event = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": self.now, "frames": frames}
        self.events.append(event)

    def segment(self) -> dict[str, Any]:
        """What is left at the end, and the gaps between."""
        blocks: list[dict[str, Any]] = []
        end = _STEP
        for address, size, frames in sorted(self._blocks.values(), key=lambda block: block[0]):
            if address > end:
                blocks.append(_block(end, address - end, []))
            blocks.append(_block(address, size, frames))
            end = address + size
        if self._end > end:
            blocks.append(_block(end, self._end - end, []))
        return _segment(_STEP, blocks)


def _block(address: int, size: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    """A block; one without frames is free."""
    state = "active_allocated" if frames else "inactive"
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}


def _segment(address: int, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    active = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    return {
        "device": 0,
        "address": address,
        "total_size": sum(block["size"] for block in blocks),
        "allocated_size": active,
        "active_size": active,
        "requested_size": active,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _frame(program: Program, buffer: int) -> dict[str, Any]:
    made = program.buffers[buffer]
    if made.producer is None:
        return {"filename": "", "line": 0, "name": f"{made.name}: a tangent"}
    return _line(program.ops[made.producer], made.name)


def _rest(program: Program, course: Course, moment: int) -> dict[str, Any]:
    """An allocation for what a moment takes besides stays."""
    match course.moments[moment].action:
        case Compute(op):
            return _line(program.ops[op], "workspace")
        case _:
            return {"filename": "", "line": 0, "name": "user code between forward and backward"}


def _line(op: Op, what: str) -> dict[str, Any]:
    """A frame as Python's tracebacks have them."""
    file, _, line = op.source.rpartition(":")
    where = f" in {op.module}" if op.module else ""
    number = int(line) if file and line.isdecimal() else 0
    return {"filename": file or op.source, "line": number, "name": f"{what} by {op.name} ({op.target}){where}"}
