"""A schedule: which op runs when, which buffer leaves when, and where the boundary between the two graphs lies.

The *canonical* schedule of an order of runs frees every buffer as early as that order allows: right after the
last read before the buffer is made again, or at once if nothing reads it. No schedule with the same runs in the
same order has less memory at any point (a copy made later has the same bits, so keeping the older one gains
nothing), hence planners need only say in which order ops run.

Moves follow one rule: a buffer has at most one copy in a slower tier per step, kept until the step ends. So it leaves
at most once, by one :class:`Offload`, and comes back by any number of :class:`Reload`; what is in a tier follows from
the schedule alone, and a backward that retains its graph finds every copy where it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbtide.step.arrays import Ints, flat
from ebbtide.step.program import Program, analysis

__all__ = ["Action", "Boundary", "Compute", "Free", "Hold", "Offload", "Reload", "Schedule", "kept_outputs"]


@dataclass(frozen=True, slots=True)
class Compute:
    """Run op ``op``: allocate its workspace and all its outputs while its inputs live."""

    op: int


@dataclass(frozen=True, slots=True)
class Free:
    """Give back the device bytes of ``buffer``; the first after its offload waits for the copy to be written."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Issue the copy of ``buffer`` to ``tier``; it stays resident until its own later :class:`Free`."""

    buffer: int
    tier: str


@dataclass(frozen=True, slots=True)
class Reload:
    """Allocate ``buffer`` and issue the way back from its tier; the first reader, or the boundary, waits."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """The forward has returned; tangents appear."""


@dataclass(frozen=True, slots=True)
class Hold:
    """No action: the canonical schedule keeps ``buffer`` up to here, so that a copy under way has time to end."""

    buffer: int


Action = Compute | Free | Offload | Reload | Boundary
KINDS: dict[type[Action], int] = {Compute: 0, Free: 1, Offload: 2, Reload: 3, Boundary: 4}


@dataclass(frozen=True)
class Schedule:
    """A sequence of actions with exactly one :class:`Boundary`. What is legal: ``step/legality.py``."""

    actions: tuple[Action, ...]

    @property
    def computes(self) -> list[int | None]:
        """Ops in the order they run, ``None`` at the boundary."""
        return [a.op if isinstance(a, Compute) else None for a in self.actions if isinstance(a, Compute | Boundary)]

    @cached_property
    def columns(self) -> tuple[NDArray[np.int8], Ints]:
        """Per action its kind, a number of :data:`KINDS`, and its op or buffer, -1 for the boundary."""
        kinds = np.fromiter((KINDS[type(action)] for action in self.actions), np.int8, len(self.actions))
        targets = (
            a.op if isinstance(a, Compute) else -1 if isinstance(a, Boundary) else a.buffer for a in self.actions
        )
        return kinds, np.fromiter(targets, np.int64, len(self.actions))

    @staticmethod
    def from_computes(program: Program, order: Sequence[int | None]) -> Schedule:
        """The canonical schedule of ``order`` (op indices, ``None`` at the boundary), movement-free.

        Raises:
            ValueError: if ``order`` has not exactly one boundary.
        """
        if sum(o is None for o in order) != 1:
            raise ValueError("an order of runs has exactly one boundary")
        order = program.before_updates(order)
        form = flat(program)
        runs = np.array([-1 if op is None else op for op in order], np.int64)
        positions = np.flatnonzero(runs >= 0)
        read, reader = form.reads.of(runs[positions])
        made, maker = form.makes.of(runs[positions])
        # What happens to each buffer, in order: a read frees it unless another read comes next.
        events = np.argsort(np.concatenate([read, made]) * (len(order) + 1) + np.concatenate([reader, maker]))
        is_read, buffer = events < len(read), np.concatenate([read, made])[events]
        read_next = np.zeros(len(events), np.bool_)
        read_next[:-1] = is_read[1:] & (buffer[1:] == buffer[:-1])
        last = np.zeros(len(read), np.bool_)
        last[events[is_read]] = ~read_next[is_read]
        freed = np.flatnonzero(last & ~form.pinned[read])
        # After which run each goes, and so where runs and frees stand.
        after = positions[reader[freed]]
        actions = np.zeros(len(order) + len(freed), np.int64)
        actions[np.arange(len(order)) + np.searchsorted(after, np.arange(len(order)))] = runs
        actions[after + 1 + np.arange(len(freed))] = len(program.ops) + read[freed]
        known = _computes_and_frees(program)
        schedule = Schedule(tuple([known[each] for each in actions.tolist()]))
        is_free = actions >= len(program.ops)
        kinds = np.where(is_free, KINDS[Free], np.where(actions < 0, KINDS[Boundary], KINDS[Compute]))
        targets = np.where(is_free, actions - len(program.ops), actions)
        schedule.__dict__["columns"] = kinds.astype(np.int8), targets  # known here already
        return schedule

    @staticmethod
    def from_steps(program: Program, steps: Sequence[Compute | Boundary | Offload | Reload | Hold]) -> Schedule:
        """The canonical schedule of ``steps``: each buffer is freed right after its last use before it comes again.

        A read, an :class:`Offload` and a :class:`Hold` are uses; a run of its op and a :class:`Reload` bring it.
        """
        pinned = program.pinned
        wanted = [False] * len(program.buffers)
        actions: list[Action] = []  # the last one first

        def use(buffer: int) -> None:
            if not wanted[buffer] and buffer not in pinned:
                actions.append(Free(buffer))
            wanted[buffer] = True

        for step in reversed(steps):
            match step:
                case Compute(op):
                    for b in program.ops[op].outputs:
                        wanted[b] = False
                    for b in reversed(program.ops[op].inputs):
                        use(b)
                case Offload(buffer, _) | Hold(buffer):
                    use(buffer)
                case Reload(buffer):
                    wanted[buffer] = False
                case Boundary():
                    pass
            if not isinstance(step, Hold):
                actions.append(step)
        return Schedule(tuple(reversed(actions)))

    @cached_property
    def moves(self) -> bool:
        """Whether any buffer is moved."""
        kinds, _ = self.columns
        return bool(np.isin(kinds, (KINDS[Offload], KINDS[Reload])).any())

    def to_json(self) -> list[list[Any]]:
        """Plain data: one short list per action."""
        rows: list[list[Any]] = []
        for action in self.actions:
            match action:
                case Compute(op):
                    rows.append(["c", op])
                case Free(buffer):
                    rows.append(["f", buffer])
                case Offload(buffer, tier):
                    rows.append(["o", buffer, tier])
                case Reload(buffer):
                    rows.append(["r", buffer])
                case Boundary():
                    rows.append(["b"])
        return rows

    @staticmethod
    def from_json(rows: Iterable[Sequence[Any]]) -> Schedule:
        """The schedule that :meth:`to_json` wrote.

        Raises:
            ValueError: if a row is not an action.
        """
        actions: list[Action] = []
        for row in rows:
            match row:
                case ["c", int(op)]:
                    actions.append(Compute(op))
                case ["f", int(buffer)]:
                    actions.append(Free(buffer))
                case ["o", int(buffer), str(tier)]:
                    actions.append(Offload(buffer, tier))
                case ["r", int(buffer)]:
                    actions.append(Reload(buffer))
                case ["b"]:
                    actions.append(Boundary())
                case _:
                    raise ValueError(f"{row!r} is not an action")
        return Schedule(tuple(actions))

    def __str__(self) -> str:
        words: list[str] = []
        for action in self.actions:
            match action:
                case Compute(op):
                    words.append(f"compute {op}")
                case Free(buffer):
                    words.append(f"free b{buffer}")
                case Offload(buffer, tier):
                    words.append(f"offload b{buffer} {tier}")
                case Reload(buffer):
                    words.append(f"reload b{buffer}")
                case Boundary():
                    words.append("boundary")
        return "\n".join(words)


@analysis
def _computes_and_frees(program: Program) -> list[Action]:
    """Every compute by its op, then every free by its buffer, then the boundary: at index -1."""
    computes = [Compute(op) for op in range(len(program.ops))]
    return [*computes, *(Free(b) for b in range(len(program.buffers))), Boundary()]


def kept_outputs(program: Program, schedule: Schedule) -> list[tuple[int, ...]]:
    """Per action, the outputs of a compute that somebody wants after it; the others go when it ends.

    A copy is wanted if it is an output of the program, if it is read, offloaded or explicitly freed before it is
    made again, or if it is a mutation and the boundary is to come.
    """
    held = set(program.pinned)  # up to the boundary, mutations too
    wanted = [b in held for b in range(len(program.buffers))]
    kept: list[tuple[int, ...]] = [()] * len(schedule.actions)
    for index in range(len(schedule.actions) - 1, -1, -1):
        match schedule.actions[index]:
            case Compute(op):
                outputs = program.ops[op].outputs
                kept[index] = tuple(b for b in outputs if wanted[b])
                for b in outputs:
                    wanted[b] = b in held
                for b in program.ops[op].inputs:
                    wanted[b] = True
            case Offload(buffer, _) | Free(buffer):
                wanted[buffer] = True
            case Reload(buffer):
                wanted[buffer] = False
            case Boundary():
                held.update(program.mutations)
                for b in program.mutations:
                    wanted[b] = True
    return kept
