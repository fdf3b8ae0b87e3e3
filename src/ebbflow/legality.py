"""What makes a schedule legal, written from the definitions and independently of the simulator.

1. Every read finds its buffer resident.
2. Before ``Boundary``: every forward output, every mutation (which the boundary takes away) and the first run of
   every random op or op that may not run again, in captured order among themselves, and nothing that depends on a
   tangent. Every op runs at least once.
3. An op may run again any number of times, before or after the boundary, unless it is not rerunnable; an op
   that reads a mutated input may not run after the boundary. A rerun makes all outputs but the last ``once``.
4. A buffer that is freed is resident; one that is reloaded was offloaded; one that is offloaded is resident.
5. Outputs of the program are never freed once they exist and exist at the end.
6. The peak on the device is within the budget, if one is given.

Clause 2 speaks of ops before the captured boundary only: a random op of the backward runs after it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from ebbflow.program import Program
from ebbflow.schedule import Boundary, Compute, Free, Offload, Reload, Schedule

__all__ = ["Violation", "check"]


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken clause.

    Attributes:
        clause: its number in the module's list.
        action: index of the action that breaks it; the number of actions for the end of the schedule.
        message: what is wrong.
    """

    clause: int
    action: int
    message: str

    def __str__(self) -> str:
        return f"clause {self.clause} at action {self.action}: {self.message}"


def check(program: Program, schedule: Schedule, above_budget_bytes: int | None = None) -> list[Violation]:
    """All violations of ``schedule``; an empty list says that it is legal.

    Args:
        program: what is scheduled.
        schedule: any sequence of actions.
        above_budget_bytes: bytes that the step may take above its start; not checked if ``None``.
    """
    checker = _Checker(program)
    for index, action in enumerate(schedule.actions):
        checker.step(index, action)
    checker.end(len(schedule.actions))
    if above_budget_bytes is not None and not checker.found:
        peak = _peak_by_lifetimes(program, schedule)
        if peak > above_budget_bytes:
            message = f"the peak is {peak} bytes above the start, the budget allows {above_budget_bytes}"
            checker.found.append(Violation(6, len(schedule.actions), message))
    return checker.found


class _Event(enum.Enum):
    MAKE = enum.auto()
    USE = enum.auto()
    FREE = enum.auto()
    RELOAD = enum.auto()  # from a slower tier, or a tangent's appearance


_Broken = Callable[[int, str], None]


class _Checker:
    """One pass over the actions with the set of resident buffers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.found: list[Violation] = []
        self.resident: set[int] = set()
        self.away: set[int] = set()
        self.ran: set[int] = set()
        self.boundaries = 0
        self.last_ordered = -1

    def step(self, index: int, action: object) -> None:
        def broken(clause: int, message: str) -> None:
            self.found.append(Violation(clause, index, message))

        buffer_count, op_count = len(self.program.buffers), len(self.program.ops)
        match action:
            case Compute(op) if 0 <= op < op_count:
                self._compute(op, broken)
            case Free(buffer) if 0 <= buffer < buffer_count:
                if buffer not in self.resident:
                    broken(4, f"buffer {buffer} is freed and is not resident")
                if buffer in self.program.pinned:
                    broken(5, f"output {buffer} is freed")
                self.resident.discard(buffer)
            case Offload(buffer, _) if 0 <= buffer < buffer_count:
                if buffer not in self.resident:
                    broken(4, f"buffer {buffer} is offloaded and is not resident")
                self.away.add(buffer)
            case Reload(buffer) if 0 <= buffer < buffer_count:
                if buffer not in self.away:
                    broken(4, f"buffer {buffer} is reloaded and was not offloaded")
                self.away.discard(buffer)
                self.resident.add(buffer)
            case Boundary():
                self._boundary(broken)
            case _:
                broken(1, f"{action!r} names no op or buffer of the program")

    def _compute(self, index: int, broken: _Broken) -> None:
        op = self.program.ops[index]
        for b in op.inputs:
            if b not in self.resident:
                broken(1, f"op {index} reads buffer {b}, which is not resident")
        ordered = op.random or not op.rerunnable
        if index not in self.ran:
            if ordered and index < self.last_ordered:
                broken(2, f"op {index} has its first run after that of op {self.last_ordered}")
            if ordered:
                self.last_ordered = index
            if ordered and index < self.program.boundary and self.boundaries:
                broken(2, f"op {index} has its first run after the boundary")
        elif not op.rerunnable:
            broken(3, f"op {index} runs again and is not rerunnable")
        if op.reads_mutated and self.boundaries:
            broken(3, f"op {index} reads a mutated input after the boundary")
        if self.program.after_boundary[index] and not self.boundaries:
            broken(2, f"op {index} depends on a tangent and runs before the boundary")
        once = op.once if index in self.ran else 0
        self.ran.add(index)
        self.resident.update(op.outputs[: len(op.outputs) - once])

    def _boundary(self, broken: _Broken) -> None:
        self.boundaries += 1
        if self.boundaries > 1:
            broken(2, "there is a second boundary")
        for b in self.program.forward_outputs:
            if b not in self.resident:
                broken(2, f"forward output {b} is not resident at the boundary")
        for b in self.program.mutations:
            if b not in self.resident:
                broken(2, f"mutation {b} is not resident at the boundary")
        self.resident.difference_update(self.program.mutations)
        self.resident.update(self.program.tangents)

    def end(self, index: int) -> None:
        if self.boundaries == 0:
            self.found.append(Violation(2, index, "there is no boundary"))
        for op in range(len(self.program.ops)):
            if op not in self.ran:
                self.found.append(Violation(2, index, f"op {op} never runs"))
        for b in sorted(self.program.pinned):
            if b not in self.resident:
                self.found.append(Violation(5, index, f"output {b} does not exist at the end"))


def _peak_by_lifetimes(program: Program, schedule: Schedule) -> int:
    """The peak of a legal schedule as a sum over lifetimes, without running it: a second opinion."""
    end = len(schedule.actions)
    spans = [
        (first, last, program.buffers[b].bytes)
        for b, events in enumerate(_events(program, schedule))
        for first, last in _lifetimes(events, end, pinned=b in program.pinned or b in program.mutations)
    ]
    runs: dict[int, list[int]] = {}
    for index, action in enumerate(schedule.actions):
        if isinstance(action, Boundary):
            tangents = sum(program.buffers[b].bytes for b in program.tangents)
            spans.append((index, end, program.held_bytes))
            spans.append((index, index, max(program.between_bytes - program.held_bytes - tangents, 0)))
        elif isinstance(action, Compute):
            runs.setdefault(action.op, []).append(index)
            spans.append((index, index, program.ops[action.op].workspace_bytes))
    for op, positions in runs.items():
        if len(positions) > 1:
            state = program.ops[op].state_bytes
            spans.append((positions[0], positions[-1], state))
            spans.extend((index, index, state) for index in positions[1:])
    change = [0] * (end + 2)
    for first, last, size in spans:
        change[first] += size
        change[last + 1] -= size
    return max(accumulate(change))


def _events(program: Program, schedule: Schedule) -> list[list[tuple[int, _Event]]]:
    """Per buffer, what happens to it: position and kind, in order."""
    events: list[list[tuple[int, _Event]]] = [[] for _ in program.buffers]
    ran: set[int] = set()
    passed = False
    for index, action in enumerate(schedule.actions):
        match action:
            case Compute(op):
                for b in program.ops[op].inputs:
                    events[b].append((index, _Event.USE))
                outputs = program.ops[op].outputs
                once = program.ops[op].once if op in ran else 0
                ran.add(op)
                for b in outputs[: len(outputs) - once]:
                    events[b].append((index, _Event.MAKE))
                    if passed and b in program.mutations:
                        events[b].append((index + 1, _Event.FREE))
            case Free(buffer):
                events[buffer].append((index, _Event.FREE))
            case Offload(buffer, _):
                events[buffer].append((index, _Event.USE))
            case Reload(buffer):
                events[buffer].append((index, _Event.RELOAD))
            case Boundary():
                for b in program.tangents:
                    events[b].append((index, _Event.RELOAD))
                passed = True
                for b in program.mutations:
                    events[b].append((index, _Event.FREE))
    return events


def _lifetimes(events: list[tuple[int, _Event]], end: int, *, pinned: bool) -> list[tuple[int, int]]:
    """First and last position of every copy of one buffer.

    A copy that is made while another is there, or that nobody uses or frees before the next, lives for its op only.
    """
    spans: list[tuple[int, int]] = []
    since: int | None = None
    for position, (index, kind) in enumerate(events):
        following = events[position + 1][1] if position + 1 < len(events) else None
        match kind:
            case _Event.MAKE if since is None and (pinned or following in (_Event.USE, _Event.FREE)):
                since = index
            case _Event.MAKE:
                spans.append((index, index))
            case _Event.RELOAD:
                since = index if since is None else since
            case _Event.FREE if since is not None:
                spans.append((since, index - 1))
                since = None
            case _:
                pass
    if since is not None:
        spans.append((since, end))
    return spans
