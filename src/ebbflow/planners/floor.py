"""A proven lower bound on the peak of any schedule that runs first computes in captured order.

At the first run of op ``t`` these bytes are live whatever the plan:
1. outputs of the program made before ``t`` (once made they are kept) and, from the boundary on, the tangents
   and what user code holds; up to the boundary, mutations;
2. what ``t`` reads, its workspace and everything it makes;
3. results of ops that may not run again (or not after the boundary) that somebody reads after ``t``.
At the boundary user code reaches its own peak above that. At the end all outputs are live. The bound assumes that
outputs are never dropped and made again.
"""

from __future__ import annotations

from ebbflow.program import Program

__all__ = ["floor_bytes"]


def floor_bytes(program: Program) -> tuple[int, int]:
    """The floor of a program.

    Returns:
        Bytes above the step's start, and the index of the op that pins them (the number of ops for the end).
    """
    n = len(program.ops)
    size = [buffer.bytes for buffer in program.buffers]
    last_read = [max(readers, default=-1) for readers in program.readers]
    held = 0  # clauses 1 and 3
    must_hold: set[int] = set()
    leaving: dict[int, list[int]] = {}
    late: list[int] = []  # results of ops that may not run again after the boundary
    best, best_op = 0, 0
    for t, op in enumerate(program.ops):
        if t == program.boundary:
            held += program.late_bytes - sum(size[b] for b in program.mutations)
            fresh = [b for b in late if b not in must_hold and last_read[b] >= t]
            must_hold.update(fresh)
            held += sum(size[b] for b in fresh)
            if held + program.between_excess_bytes > best:
                best, best_op = held + program.between_excess_bytes, t
            for b in fresh:
                leaving.setdefault(last_read[b], []).append(b)
        read = sum(size[b] for b in op.inputs if b not in must_hold and b not in program.pinned)
        total = held + read + op.workspace_bytes + sum(size[b] for b in op.outputs)
        if total > best:
            best, best_op = total, t
        held -= sum(size[b] for b in leaving.pop(t, []))
        for b in op.outputs:
            if b in program.pinned or b in program.mutations:
                held += size[b]
            elif not op.rerunnable and last_read[b] > t:
                held += size[b]
                must_hold.add(b)
                leaving.setdefault(last_read[b], []).append(b)
            elif op.reads_mutated:
                late.append(b)
    if program.boundary == n:
        held += program.late_bytes - sum(size[b] for b in program.mutations) + program.between_excess_bytes
    return (held, n) if held > best else (best, best_op)
