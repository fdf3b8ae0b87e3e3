"""What TFLMS asks of a graph: topological levels, which op reaches which, and where a swap-in may be triggered.

Definitions:
1. The *level* of an op is its depth in the graph of reads. What reads a tangent follows the forward's outputs, and the
   backward lies behind all of the forward, as it does behind a loss.
2. *Serialised* levels: their ops are made to follow each other in captured order, those of neighbouring levels too, and
   levels are counted anew.
3. A *swap-in* brings a buffer back for some of its readers once its *trigger* op has ended.

Where the published code takes any member of a set, here it is the last one in captured order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ebbtide.step.program import Program
from ebbtide_published.planners.moving import Tiers

__all__ = ["Levels", "SwapIn", "loads_of"]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """A swap-in (definition 3).

    Attributes:
        buffer: that comes back.
        readers: that it serves, ascending.
        trigger: the op; ``None`` if it comes back right before its first reader.
    """

    buffer: int
    readers: tuple[int, ...]
    trigger: int | None


class Levels:
    """Levels of a program's ops (definitions 1 and 2).

    Args:
        program: any.
        serialised: numbers of levels.
    """

    def __init__(self, program: Program, serialised: Collection[int] = ()) -> None:
        self.program = program
        self._before = _producers(program)
        self.of = self._depths(range(len(program.ops)))
        if serialised:
            self._serialise(serialised)
        self.size = max(self.of, default=-1) + 1
        self.at: list[list[int]] = [[] for _ in range(self.size)]
        for op, level in enumerate(self.of):
            self.at[level].append(op)
        self._behind = self._reached()
        boundary = program.boundary
        self.backward = min(self.of[boundary:], default=self.size)

    def reaches(self, op: int, other: int) -> bool:
        """Whether a path leads from ``op`` to ``other``."""
        return bool(self._behind[other] >> op & 1)

    def first_of(self, ops: Iterable[int]) -> list[int]:
        """Those of some ops that no other of them reaches."""
        given = list(ops)
        mask = sum(1 << op for op in given)
        return [op for op in given if not self._behind[op] & mask]

    def trigger(self, reader: int, levels: Sequence[int]) -> int | None:
        """An op that reaches ``reader``, of the first of ``levels`` that has one."""
        for level in levels:
            found = [op for op in self.at[level] if self.reaches(op, reader)] if 0 <= level < self.size else []
            if found:
                return found[-1]
        return None

    def _depths(self, order: Iterable[int]) -> list[int]:
        found = [0] * len(self.program.ops)
        least = 0
        boundary = self.program.boundary
        for op in sorted(order, key=lambda each: each >= boundary):  # the forward first; stable
            found[op] = max((found[each] + 1 for each in self._before[op]), default=0)
            if op < boundary:
                least = max(least, found[op] + 1)
            else:
                found[op] = max(found[op], least)
        return found

    def _serialise(self, levels: Collection[int]) -> None:
        """Add edges between levels (definition 2). Edges go up in level, then in captured order: there is no cycle."""
        order = sorted(range(len(self.of)), key=lambda op: (self.of[op], op))
        last, last_level = -1, -2
        for op in order:
            if self.of[op] in levels:
                if last >= 0 and self.of[op] - last_level <= 1:
                    self._before[op].add(last)
                last, last_level = op, self.of[op]
        self.of = self._depths(order)

    def _reached(self) -> list[int]:
        """Per op the set of those that reach it, as the bits of a number."""
        found = [0] * len(self.of)
        for op in sorted(range(len(self.of)), key=lambda each: self.of[each]):
            for each in self._before[op]:
                found[op] |= found[each] | 1 << each
        return found


def _producers(program: Program) -> list[set[int]]:
    """Per op, those that it reads from; the forward's outputs stand for tangents."""
    ends = {program.buffers[b].producer for b in program.forward_outputs}
    found: list[set[int]] = []
    for op in program.ops:
        made: set[int | None] = {program.buffers[b].producer for b in op.inputs}
        made |= ends if None in made else set()
        found.append({each for each in made if each is not None})
    return found


def loads_of(program: Program, swap_ins: Sequence[SwapIn], tiers: Tiers) -> frozenset[tuple[int, int]]:
    """The loads of swap-ins, as ``(buffer, stage)``.

    A buffer is on the device once: where one copy is there still when the next is to come, it stays and serves both.
    Readers without a swap-in read the buffer as it was made.
    """
    per_buffer: dict[int, list[SwapIn]] = {}
    for each in swap_ins:
        per_buffer.setdefault(each.buffer, []).append(each)
    loads: set[tuple[int, int]] = set()
    for b, each in per_buffer.items():
        stages = list(_stages(program, b, each))
        if stages and tiers.take(b):
            loads.update((b, stage) for stage in stages)
    return frozenset(loads)


def _stages(program: Program, b: int, swap_ins: Sequence[SwapIn]) -> Iterator[int]:
    served = {reader for each in swap_ins for reader in each.readers}
    producer = program.buffers[b].producer
    assert producer is not None
    there = max((reader for reader in program.readers[b] if reader not in served), default=producer)
    for each in sorted(swap_ins, key=lambda one: one.readers):
        first, last = each.readers[0], each.readers[-1]
        stage = first if each.trigger is None else min(each.trigger + 1, first)
        if stage > there:
            yield stage
        there = max(there, last)
