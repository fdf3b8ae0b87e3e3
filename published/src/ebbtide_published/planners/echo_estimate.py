"""Echo's estimate: which cheap ops of a region are better kept, by bytes released against bytes allocated.

Definitions:
1. At first every cheap op is made again. The *frontier* of a region are those of its ops that are made again and
   whose inputs are all kept: made by borders or by ops that were decided to be kept.
2. A *group* are ops of the frontier that share inputs, transitively: if A and B read one buffer and B and C another,
   all three are one.
3. Keeping a group *allocates* its outputs that anybody reads and those of its inputs that an op outside the frontier
   reads still, in the forward or in the backward. It *releases* its inputs that only the frontier reads. Readers are
   those of the whole step.
4. A group that releases as many bytes as it allocates, or more, is kept; the frontier moves on behind it. All others,
   and what lies behind them, are made again.

Forward outputs are held whatever is decided and count on neither side, and neither do parameters and inputs, which are
no buffers here: MXNet's code counts the bytes of a variable that only the frontier reads as released. All groups of a
frontier are judged before it moves; the authors' code begins anew after each that is kept, in the order of a hash
table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ebbtide.step.program import Program

__all__ = ["balance", "made_again"]


def made_again(program: Program, border: Collection[int], region: Sequence[int]) -> frozenset[int]:
    """The ops of a region that are made again (definition 4).

    Args:
        program: any.
        border: forward ops that never run again.
        region: cheap ops, closed under shared inputs (``echo_regions``).
    """
    again = set(region)
    waits = {op: len(_made_in(program, op, again)) for op in region}
    frontier: set[int] = set()
    fresh = [op for op in region if not waits[op]]
    while fresh:
        frontier.update(fresh)
        judged: set[int] = set()
        moved: list[int] = []
        for op in fresh:
            if op in judged:
                continue
            group = _group(program, frontier, op)
            judged |= group
            allocated, released = balance(program, frontier, group)
            if released < allocated:
                continue
            frontier -= group
            again -= group
            for reader in _readers_in(program, group, again):
                waits[reader] -= 1
                if not waits[reader]:
                    moved.append(reader)
        fresh = sorted(moved)
    return frozenset(again)


def balance(program: Program, frontier: Collection[int], group: Iterable[int]) -> tuple[int, int]:
    """Bytes that keeping a group of the frontier allocates and releases (definition 3)."""
    allocated: set[int] = set()
    released: set[int] = set()
    for op in group:
        allocated.update(b for b in program.ops[op].outputs if program.readers[b])
        for b in program.ops[op].inputs:
            (released if all(r in frontier for r in program.readers[b]) else allocated).add(b)
    size = program.buffers
    free = program.pinned
    return sum(size[b].bytes for b in allocated - free), sum(size[b].bytes for b in released - free)


def _group(program: Program, frontier: Collection[int], op: int) -> set[int]:
    """The group of an op of the frontier (definition 2)."""
    group = {op}
    spread = [op]
    while spread:
        for b in program.ops[spread.pop()].inputs:
            others = [r for r in program.readers[b] if r in frontier and r not in group]
            group.update(others)
            spread.extend(others)
    return group


def _made_in(program: Program, op: int, ops: Collection[int]) -> set[int]:
    """Those of ``ops`` that make what ``op`` reads."""
    return {p for b in program.ops[op].inputs if (p := program.buffers[b].producer) is not None and p in ops}


def _readers_in(program: Program, group: Iterable[int], ops: Collection[int]) -> Iterable[int]:
    """Those of ``ops`` that read what an op of the group makes, once per such op."""
    for op in group:
        yield from {r for b in program.ops[op].outputs for r in program.readers[b] if r in ops}
