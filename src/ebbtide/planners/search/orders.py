"""Orders of first runs: which are legal, and what comes before what in all of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from ebbtide.step.program import Program

__all__ = ["CapturedOrder", "FreeOrder", "Order", "first_runs", "precedences"]

Order = Sequence[int | None]


def first_runs(order: Order) -> list[int | None]:
    """An order of runs without its reruns."""
    seen: set[int | None] = set()
    return [op for op in order if not (op in seen or seen.add(op))]


def precedences(program: Program) -> list[tuple[int, int]]:
    """Pairs of ops of which the first has its first run before the second; the boundary is op ``len(ops)``."""
    boundary = len(program.ops)
    found: set[tuple[int, int]] = set()
    for index, op in enumerate(program.ops):
        producers = (program.buffers[b].producer for b in op.inputs)
        found.update((producer, index) for producer in producers if producer is not None)
        if op.reads_mutated or (index < program.boundary and (op.random or not op.rerunnable)):
            found.add((index, boundary))
        if program.after_boundary[index]:
            found.add((boundary, index))
    made_before = (program.buffers[b].producer for b in (*program.forward_outputs, *program.mutations))
    found.update((producer, boundary) for producer in made_before if producer is not None)
    ordered = [index for index, op in enumerate(program.ops) if op.random or not op.rerunnable]
    found.update(pairwise(ordered))
    return sorted(found)


class CapturedOrder:
    """First runs in captured order: what always runs before what."""

    def __init__(self, program: Program) -> None:
        self._ops, self._boundary = len(program.ops), program.boundary

    def before(self, op: int, other: int) -> bool:
        """Whether the first run of ``op`` always comes before that of ``other``."""
        return op < other

    def comparable(self, op: int, other: int) -> bool:
        """Whether they are two ops of which one always comes first."""
        return op != other

    def between(self, cut: int, following: int | None) -> Collection[int]:
        """Ops that always come after ``cut`` and, if it is given, before ``following`` or are it."""
        return range(cut + 1, self._ops if following is None else following + 1)

    def is_early(self, op: int) -> bool:
        """Whether the first run of ``op`` always comes before the boundary."""
        return op < self._boundary

    def is_late(self, op: int) -> bool:
        """Whether it always comes after the boundary."""
        return op >= self._boundary


class FreeOrder(CapturedOrder):
    """First runs in any legal order (clauses 1 and 2 of legality).

    Args:
        program: any.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._after: list[list[int]] = [[] for _ in range(self._ops + 1)]
        self._ahead: list[list[int]] = [[] for _ in range(self._ops + 1)]
        for first, second in precedences(program):
            self._after[first].append(second)
            self._ahead[second].append(first)
        self._closed: dict[tuple[int, bool], frozenset[int]] = {}

    def _reach(self, op: int, later: bool) -> frozenset[int]:
        """All that always comes after ``op``, or before it."""
        if (op, later) not in self._closed:
            links = self._after if later else self._ahead
            found: set[int] = set()
            fresh = [op]
            while fresh:
                new = set(links[fresh.pop()]) - found
                found |= new
                fresh.extend(new)
            self._closed[op, later] = frozenset(found)
        return self._closed[op, later]

    def before(self, op: int, other: int) -> bool:
        """Whether the first run of ``op`` comes before that of ``other`` in every legal order."""
        return op in self._reach(other, False)

    def comparable(self, op: int, other: int) -> bool:
        """Whether one of them comes first in every legal order."""
        return op in self._reach(other, False) or op in self._reach(other, True)

    def between(self, cut: int, following: int | None) -> Collection[int]:
        """Ops that come after ``cut`` and, if it is given, before ``following`` or are it, in every legal order."""
        found = self._reach(cut, True) - {self._ops}
        return found if following is None else found & (self._reach(following, False) | {following})

    def is_early(self, op: int) -> bool:
        """Whether the first run of ``op`` comes before the boundary in every legal order."""
        return op in self._reach(self._ops, False)

    def is_late(self, op: int) -> bool:
        """Whether it comes after the boundary in every legal order."""
        return op in self._reach(self._ops, True)
