"""What the floor is made of: the bytes that are live at the moment that pins it, part by part.

``py`` proves a number in one pass; here the same clauses are written down for its one moment, so that the
parts name buffers and add up to that number exactly. A moment is the first run of an op, the boundary while user
code runs, or the end of the step.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.step.program import Program

__all__ = ["Floor", "FloorPart", "Part", "floor_parts"]


class Part(enum.Enum):
    """Why bytes are live under any plan of the floor's class: the clause of ``planners/bounds/floor.py``, and words."""

    OUTPUTS = "forward outputs made before it"  # clause 1
    GRADIENTS = "gradients made before it"  # clause 1
    MUTATIONS = "new values that wait for the boundary"  # clause 1
    TANGENTS = "gradients of the forward's outputs (tangents)"  # clause 1
    USER_CODE = "what user code takes"  # clause 1
    READS = "what it reads besides"  # clause 2
    WORKSPACE = "its workspace"  # clause 2
    MAKES = "what it makes"  # clause 2
    SINGLE_RUN = "results of ops that may not run again"  # clause 3
    BEFORE_CHANGE = "results that need an input as it was before its change in place"  # clause 3


@dataclass(frozen=True, slots=True)
class FloorPart:
    """One part.

    Attributes:
        part: why these bytes are live.
        bytes: how many.
        buffers: indices of the buffers that they are, ascending; empty for workspace and user code.
    """

    part: Part
    bytes: int
    buffers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Floor:
    """The floor and its parts.

    Attributes:
        bytes: above the step's start; the sum of all parts.
        op: index of the op that pins it, the number of ops for the end.
        moment: its run, the boundary just before it, or the end of the step.
        parts: those that are not empty.
    """

    bytes: int
    op: int
    moment: Literal["op", "boundary", "end"]
    parts: tuple[FloorPart, ...]

    def of(self, *parts: Part) -> int:
        """Bytes of ``parts`` together."""
        return sum(each.bytes for each in self.parts if each.part in parts)

    def buffers_of(self, *parts: Part) -> tuple[int, ...]:
        """Buffers of ``parts`` together."""
        return tuple(b for each in self.parts if each.part in parts for b in each.buffers)


def floor_parts(program: Program) -> Floor:
    """The floor of ``program``, taken apart; its bytes are those of :func:`floor_bytes`."""
    total, op = floor_bytes(program)
    moments: tuple[Literal["op", "boundary", "end"], ...] = ("op",)
    if op == len(program.ops):
        moments = ("end",)
    elif op == program.boundary:
        moments = ("boundary", "op")
    for moment in moments:
        parts = _held_parts(program, op, moment) + (_of_the_op(program, op) if moment == "op" else [])
        if sum(each.bytes for each in parts) == total:
            return Floor(total, op, moment, tuple(each for each in parts if each.bytes))
    raise AssertionError(f"the parts of the floor of {program.name} at op {op} do not add up to {total} bytes")


def _part(program: Program, part: Part, buffers: set[int]) -> FloorPart:
    return FloorPart(part, sum(program.buffers[b].bytes for b in buffers), tuple(sorted(buffers)))


def _held_parts(program: Program, t: int, moment: str) -> list[FloorPart]:
    """Bytes that no schedule can be without at ``t``, an op, the boundary or the end (clauses 1 and 3)."""
    late = t >= program.boundary

    def made(buffers: tuple[int, ...]) -> set[int]:
        return {b for b in buffers if (producer := program.buffers[b].producer) is not None and producer < t}

    user_code = program.held_bytes if late else 0
    if moment == "boundary" or (moment == "end" and program.boundary == len(program.ops)):
        user_code += program.between_excess_bytes
    outputs = made(program.forward_outputs)
    single, before_change = _not_made_again(program, t)
    return [
        _part(program, Part.OUTPUTS, outputs),
        _part(program, Part.GRADIENTS, made(program.gradients) - outputs),
        _part(program, Part.MUTATIONS, set() if late else made(program.mutations)),
        _part(program, Part.TANGENTS, set(program.tangents) if late else set()),
        FloorPart(Part.USER_CODE, user_code),
        _part(program, Part.SINGLE_RUN, single),
        _part(program, Part.BEFORE_CHANGE, before_change),
    ]


def _not_made_again(program: Program, t: int) -> tuple[set[int], set[int]]:
    """Find results read at ``t`` or later whose ops may not run again, or not so late (clause 3)."""
    single: set[int] = set()
    before_change: set[int] = set()
    for index, op in enumerate(program.ops[:t]):
        if op.rerunnable and not (op.reads_mutated and index < program.boundary <= t):
            continue
        found = {
            b
            for b in op.outputs
            if b not in program.pinned and b not in program.mutations and max(program.readers[b], default=-1) >= t
        }
        (before_change if op.rerunnable else single).update(found)
    return single, before_change


def _of_the_op(program: Program, t: int) -> list[FloorPart]:
    """Bytes of op ``t`` itself: other inputs, its workspace, and what it makes (clause 2)."""
    op = program.ops[t]
    single, before_change = _not_made_again(program, t)
    return [
        _part(program, Part.READS, set(op.inputs) - program.pinned - single - before_change),
        FloorPart(Part.WORKSPACE, op.workspace_bytes),
        _part(program, Part.MAKES, set(op.outputs)),
    ]
