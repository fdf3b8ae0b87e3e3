"""A schedule: which op runs when, which buffer leaves when, and where the boundary between the two graphs lies.

The *canonical* schedule of an order of runs frees every buffer as early as that order allows: right after the
last read before the buffer is made again, or at once if nothing reads it. No schedule with the same runs in the
same order has less memory at any point (a copy made later has the same bits, so keeping the older one gains
nothing), hence planners need only say in which order ops run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ebbflow.program import Program

__all__ = ["Action", "Boundary", "Compute", "Free", "Offload", "Reload", "Schedule", "kept_outputs"]


@dataclass(frozen=True, slots=True)
class Compute:
    """Run op ``op``: allocate its workspace and all its outputs while its inputs live."""

    op: int


@dataclass(frozen=True, slots=True)
class Free:
    """Give back the device bytes of ``buffer``; after an offload this waits for the copy."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Issue a copy of ``buffer`` to ``tier``; it stays resident until its own later :class:`Free`."""

    buffer: int
    tier: str


@dataclass(frozen=True, slots=True)
class Reload:
    """Allocate ``buffer`` here and issue the copy back from its tier; the first reader waits."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """The forward has returned; tangents appear."""


Action = Compute | Free | Offload | Reload | Boundary


@dataclass(frozen=True)
class Schedule:
    """A sequence of actions with exactly one :class:`Boundary`. What is legal: ``legality.py``."""

    actions: tuple[Action, ...]

    @property
    def computes(self) -> list[int | None]:
        """Ops in the order they run, ``None`` at the boundary."""
        return [a.op if isinstance(a, Compute) else None for a in self.actions if isinstance(a, Compute | Boundary)]

    @staticmethod
    def from_computes(program: Program, order: Sequence[int | None]) -> Schedule:
        """The canonical schedule of ``order`` (op indices, ``None`` at the boundary), movement-free.

        Raises:
            ValueError: if ``order`` has not exactly one boundary.
        """
        if sum(o is None for o in order) != 1:
            raise ValueError("an order of runs has exactly one boundary")
        needed_later = [b in program.pinned for b in range(len(program.buffers))]
        frees_after: list[list[int]] = [[] for _ in order]
        for position in range(len(order) - 1, -1, -1):
            index = order[position]
            if index is None:
                continue
            op = program.ops[index]
            for b in op.outputs:
                # Before this point the buffer is dead until it is read earlier still; pinned ones stay
                # from their first run on, so their earlier copies are needed as well.
                if b not in program.pinned:
                    needed_later[b] = False
            for b in op.inputs:
                if not needed_later[b]:
                    frees_after[position].append(b)
                    needed_later[b] = True
        actions: list[Action] = []
        for position, index in enumerate(order):
            actions.append(Boundary() if index is None else Compute(index))
            actions.extend(Free(b) for b in frees_after[position])
        return Schedule(tuple(actions))

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
            ValueError: if a row is no action.
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
                    raise ValueError(f"{row!r} is no action")
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
