"""What makes a schedule legal, written from the definitions and independently of the simulator.

1. Every read finds its buffer resident.
2. Before ``Boundary``: every forward output, every mutation (which the boundary takes away) and the first run of
   every random op or op that may not run again, in captured order among themselves, and nothing that depends on a
   tangent. Every op runs at least once.
3. An op may run again any number of times, before or after the boundary, unless it is not rerunnable; an op
   that reads a mutated input may not run after the boundary, nor one that reads what an update changes after that. A
   rerun makes all outputs but the last ``once``.
4. A buffer that is freed is resident. One that is offloaded is resident and movable (no output, tangent or mutation,
   the whole of its storage), and is offloaded once, to a tier that the machine has, where it is worth the while. One
   that is reloaded was offloaded and is not resident, and is read before it is freed or the step ends.
5. Outputs of the program are never freed once they exist and exist at the end.
6. The peak on the device is within the budget, if one is given.
7. What is in a tier, where a copy stays until the step ends, is within the tier's capacity.

Clause 2 speaks of ops before the captured boundary only: a random op of the backward runs after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from ebbtide.step.machine import Link
from ebbtide.step.program import Program
from ebbtide.step.schedule import Boundary, Compute, Free, Offload, Reload, Schedule

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


def check(
    program: Program,
    schedule: Schedule,
    above_budget_bytes: int | None = None,
    links: Mapping[str, Link] | None = None,
) -> list[Violation]:
    """All violations of ``schedule``; an empty list says that it is legal.

    Args:
        program: what is scheduled.
        schedule: any sequence of actions.
        above_budget_bytes: bytes that the step may take above its start; not checked if ``None``.
        links: to the tiers that there are, by tier; clause 7, and what a tier takes, are not checked if ``None``.
    """
    checker = _Checker(program, links)
    for index, action in enumerate(schedule.actions):
        checker.step(index, action)
    checker.end(len(schedule.actions))
    if above_budget_bytes is not None and not checker.found:
        peak = _peak_by_lifetimes(program, schedule)
        if peak > above_budget_bytes:
            message = f"the peak is {peak} bytes above the start, the budget allows {above_budget_bytes}"
            checker.found.append(Violation(6, len(schedule.actions), message))
    return checker.found


class _Checker:
    """One pass over the actions with the set of resident buffers."""

    def __init__(self, program: Program, links: Mapping[str, Link] | None) -> None:
        self.program = program
        self.links = links
        self.found: list[Violation] = []
        self.resident: set[int] = set()
        self.copied: dict[int, str] = {}  # buffers with a copy, and its tier
        self.unread: set[int] = set()  # reloaded, and not read since
        self.unused: set[int] = set()  # made anew, and not used since: gone, if nothing uses them before they return
        self.ran: set[int] = set()
        self.boundaries = 0
        self.last_ordered = -1
        self.index = 0
        self.ops, self.buffers = len(program.ops), len(program.buffers)

    def _broken(self, clause: int, message: str) -> None:
        self.found.append(Violation(clause, self.index, message))

    def step(self, index: int, action: object) -> None:
        self.index = index
        buffer_count, op_count = self.buffers, self.ops
        match action:
            case Compute(op) if 0 <= op < op_count:
                self._compute(op)
            case Free(buffer) if 0 <= buffer < buffer_count:
                if buffer not in self.resident:
                    self._broken(4, f"buffer {buffer} is freed and is not resident")
                if buffer in self.program.pinned:
                    self._broken(5, f"output {buffer} is freed")
                if buffer in self.unread:
                    self._broken(4, f"buffer {buffer} is freed and was not read since it was reloaded")
                self.resident.discard(buffer)
                self.unread.discard(buffer)
                self.unused.discard(buffer)
            case Offload(buffer, tier) if 0 <= buffer < buffer_count:
                self._offload(buffer, tier)
            case Reload(buffer) if 0 <= buffer < buffer_count:
                if buffer not in self.copied:
                    self._broken(4, f"buffer {buffer} is reloaded and was not offloaded")
                if buffer in self.resident and buffer not in self.unused:
                    self._broken(4, f"buffer {buffer} is reloaded and is resident")
                self.resident.add(buffer)
                self.unused.discard(buffer)
                self.unread.add(buffer)
            case Boundary():
                self._boundary()
            case _:
                self._broken(1, f"{action!r} names no op or buffer of the program")

    def _offload(self, buffer: int, tier: str) -> None:
        size = self.program.buffers[buffer].bytes
        if buffer not in self.resident:
            self._broken(4, f"buffer {buffer} is offloaded and is not resident")
        if buffer in self.copied:
            self._broken(4, f"buffer {buffer} is offloaded a second time")
        if buffer not in self.program.movable:
            self._broken(4, f"buffer {buffer} is offloaded and may not be moved")
        if self.links is not None and tier not in self.links:
            self._broken(4, f"buffer {buffer} is offloaded to {tier!r}, to which there is no link")
        elif self.links is not None and size < self.links[tier].least_bytes:
            least = self.links[tier].least_bytes
            self._broken(4, f"buffer {buffer} of {size} bytes is offloaded to {tier!r}, which takes {least} or more")
        self.copied[buffer] = tier
        self.unused.discard(buffer)

    def _compute(self, index: int) -> None:
        op = self.program.ops[index]
        self.unread.difference_update(op.inputs)
        self.unused.difference_update(op.inputs)
        for b in op.inputs:
            if b not in self.resident:
                self._broken(1, f"op {index} reads buffer {b}, which is not resident")
        ordered = op.random or not op.rerunnable
        if index not in self.ran:
            if ordered and index < self.last_ordered:
                self._broken(2, f"op {index} has its first run after that of op {self.last_ordered}")
            if ordered:
                self.last_ordered = index
            if ordered and index < self.program.boundary and self.boundaries:
                self._broken(2, f"op {index} has its first run after the boundary")
        elif not op.rerunnable:
            self._broken(3, f"op {index} runs again and is not rerunnable")
        if op.reads_mutated and self.boundaries:
            self._broken(3, f"op {index} reads a mutated input after the boundary")
        for update in op.until:
            if update in self.ran:
                self._broken(3, f"op {index} reads what op {update} has changed")
        if self.program.after_boundary[index] and not self.boundaries:
            self._broken(2, f"op {index} depends on a tangent and runs before the boundary")
        once = op.once if index in self.ran else 0
        self.ran.add(index)
        made = op.outputs[: len(op.outputs) - once]
        self.unused.update(b for b in made if b not in self.resident)
        self.resident.update(made)

    def _boundary(self) -> None:
        self.boundaries += 1
        if self.boundaries > 1:
            self._broken(2, "there is a second boundary")
        for b in self.program.forward_outputs:
            if b not in self.resident:
                self._broken(2, f"forward output {b} is not resident at the boundary")
        for b in self.program.mutations:
            if b not in self.resident:
                self._broken(2, f"mutation {b} is not resident at the boundary")
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
        for b in sorted(self.unread):
            self.found.append(Violation(4, index, f"buffer {b} is reloaded and never read"))
        for tier, link in (self.links or {}).items():
            held = sum(link.round_up(self.program.buffers[b].bytes) for b, to in self.copied.items() if to == tier)
            if held > link.capacity_bytes:
                text = f"{held} bytes are in tier {tier!r} at the end, which holds {link.capacity_bytes}"
                self.found.append(Violation(7, index, text))


def _peak_by_lifetimes(program: Program, schedule: Schedule) -> int:
    """The peak of a legal schedule as a sum over lifetimes, without adding up what is live: a second opinion."""
    end = len(schedule.actions)
    lives = _Lifetimes(program, end)
    ran: set[int] = set()
    random_runs: dict[int, list[int]] = {}
    mutations = frozenset(program.mutations)
    passed = False
    for index, action in enumerate(schedule.actions):
        match action:
            case Compute(o):
                op = program.ops[o]
                for b in op.inputs:
                    lives.wanted(b)
                made = op.outputs[: len(op.outputs) - op.once] if o in ran else op.outputs
                ran.add(o)
                if op.random:
                    random_runs.setdefault(o, []).append(index)
                for b in made:
                    if b in mutations and passed:  # they left at the boundary, and are not copied back again
                        lives.add(index, index, program.buffers[b].bytes)
                    else:
                        lives.materialized(index, b)
                if op.workspace_bytes:
                    lives.add(index, index, op.workspace_bytes)
            case Free(b):
                lives.wanted(b)
                lives.gone(index, b)
            case Offload(b, _):
                lives.wanted(b)
            case Reload(b):
                lives.loaded(index, b)
            case Boundary():
                passed = True
                tangents = sum(program.buffers[b].bytes for b in program.tangents)
                lives.add(index, end, program.held_bytes)
                lives.add(index, index, max(program.between_bytes - program.held_bytes - tangents, 0))
                for b in program.tangents:
                    lives.loaded(index, b)
                for b in program.mutations:
                    lives.gone(index, b)
    lives.end()
    for o, positions in random_runs.items():
        state = program.ops[o].state_bytes
        if len(positions) > 1:
            lives.add(positions[0], positions[-1], state)
            for index in positions[1:]:
                lives.add(index, index, state)
    return max(accumulate(lives.change))


class _Lifetimes:
    """Lifetimes of copies, each added up once its end is known.

    A copy that is made while another is there, or that nobody uses or frees before the next, lives for its op only.
    """

    def __init__(self, program: Program, end: int) -> None:
        self.size = [buffer.bytes for buffer in program.buffers]
        self.change = [0] * (end + 2)  # bytes that begin at an action, less those that ended with the one before
        self.last = end
        self.stays = program.pinned.union(program.mutations)  # wanted without being read
        self.since: dict[int, int] = {}  # copies that live, by buffer
        self.unsure: dict[int, int] = {}  # copies of which it is not known yet whether anybody wants them

    def add(self, first: int, last: int, size: int) -> None:
        """Bytes that live through actions ``first`` to ``last``."""
        self.change[first] += size
        self.change[last + 1] -= size

    def materialized(self, index: int, b: int) -> None:
        """A copy is made."""
        self._unwanted(b)
        if b in self.since:
            self.add(index, index, self.size[b])
        elif b in self.stays:
            self.since[b] = index
        else:
            self.unsure[b] = index

    def wanted(self, b: int) -> None:
        """The last copy is used."""
        if b in self.unsure:
            self.since[b] = self.unsure.pop(b)

    def loaded(self, index: int, b: int) -> None:
        """A copy comes from elsewhere."""
        self._unwanted(b)
        self.since.setdefault(b, index)

    def gone(self, index: int, b: int) -> None:
        """The copy is given back just before ``index``."""
        if b in self.since:
            self.add(self.since.pop(b), index - 1, self.size[b])

    def end(self) -> None:
        """Nothing is used any more."""
        for b in list(self.unsure):
            self._unwanted(b)
        for b, index in self.since.items():
            self.add(index, self.last, self.size[b])

    def _unwanted(self, b: int) -> None:
        if b in self.unsure:
            index = self.unsure.pop(b)
            self.add(index, index, self.size[b])
