"""Echo's regions: cheap ops between heavy ones, closed under shared inputs; and where a chain of states is cut.

Definitions (the *forward* is ``ops[:boundary]``):
1. A *border* is a forward op that never runs again: its policy is not ``BOTH``, or it is the end of a chain
   (definition 4). All others are *cheap*.
2. A *region* is a set of cheap ops: from the forward's ends, walk backward through cheap ops; the border that ends a
   walk begins another. Then, for every buffer that an op of the region, or the border that it was walked from,
   reads, and every other output of its ops, walk forward from the other readers to the next border or end, and
   backward again, to the fixpoint: whether a shared buffer can go depends on all branches that read it. The fixpoint
   does not depend on where one begins: it is what hangs together if readers of one buffer do, and a cheap op and its
   readers do. (The authors' walks come to readers of a second output in a later region, which then has that op too.)
3. The *level* of an op is the largest number of heavy ops (policy ``INPUTS``) on a way to it, itself included. A cheap
   op *carries* a cheap input over a *step* if its level is above the input's: what else it reads came through a heavy
   op that the input has passed by. An LSTM's ``c' = f * c + i * g`` carries ``c``, for ``f`` comes from a product of
   the state before; the stream of a residual network and a GRU's ``h`` are carried just so. No name is looked at.
4. The *depth* of a cheap op is the largest number of steps on a way to it that meets no border. A chain is cut at
   *cap* steps: a cheap input with whose step the depth of its reader would exceed the cap becomes a border.

The hidden state of an LSTM ends at a product. Its cell state does not, and could be chased back through all time
steps: the research version stops at it, by its name ("state"), which is a cap of 0; the merged version stops nowhere,
which is no cap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ebbtide.step.program import Program
from ebbtide_published.planners.echo_policy import Policy

__all__ = ["borders", "regions"]


def borders(program: Program, policy: Sequence[Policy], cap: int | None) -> frozenset[int]:
    """Forward ops that never run again (definitions 1 and 4).

    Args:
        program: any.
        policy: of every forward op.
        cap: steps over which a value may be made again from the one before; ``None`` for any number.
    """
    found = {op for op, each in enumerate(policy) if each is not Policy.BOTH}
    if cap is None:
        return frozenset(found)
    level, depth = _levels(program, policy), [0] * program.boundary
    for op in range(program.boundary):
        if op in found:
            continue
        for made_by in _producers(program, op):
            if made_by in found:
                continue
            steps = depth[made_by] + (level[op] > level[made_by])
            if steps > cap:
                found.add(made_by)
            else:
                depth[op] = max(depth[op], steps)
    return frozenset(found)


def regions(program: Program, border: Collection[int]) -> list[tuple[int, ...]]:
    """The cheap ops of every region, ascending (definition 2); regions by their first op."""
    root = list(range(program.boundary))

    def find(op: int) -> int:
        while root[op] != op:
            root[op] = root[root[op]]
            op = root[op]
        return op

    for op in range(program.boundary):
        for b in program.ops[op].outputs:
            readers = [r for r in program.readers[b] if r < program.boundary]
            first = op if op not in border else next(iter(readers), op)
            for reader in readers:
                low, high = sorted((find(first), find(reader)))
                root[high] = low
    found: dict[int, list[int]] = {}
    for op in range(program.boundary):
        if op not in border:
            found.setdefault(find(op), []).append(op)
    return [tuple(ops) for ops in found.values()]


def _levels(program: Program, policy: Sequence[Policy]) -> list[int]:
    """The level of every forward op (definition 3)."""
    level: list[int] = []
    for op, each in enumerate(policy):
        below = max((level[made_by] for made_by in _producers(program, op)), default=0)
        level.append(below + (each is Policy.INPUTS))
    return level


def _producers(program: Program, op: int) -> Iterable[int]:
    """The ops that made what a forward op reads."""
    return (p for b in program.ops[op].inputs if (p := program.buffers[b].producer) is not None)
