"""A proven lower bound on the peak of any schedule with first runs in captured order, the boundary among them.

A schedule that reorders first runs, or that moves an op over the boundary, may stay below it. At the first run of op
``t`` these bytes are live in every other:
1. outputs of the program made before ``t`` (once made they are kept) and, from the boundary on, the tangents
   and what user code holds; up to the boundary, mutations;
2. what ``t`` reads, its workspace and everything it makes;
3. results of ops that may not run again (or not after the boundary) that somebody reads after ``t``.
At the boundary user code reaches its own peak above that. At the end all outputs are live. The bound assumes that
outputs are never dropped and made again. Where buffers may leave for another tier, those that may are no part of
clause 3: nobody has to make them again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ebbtide.step.arrays import flat
from ebbtide.step.program import Program, analysis

__all__ = ["floor_bytes", "floor_where"]


@analysis
def floor_bytes(program: Program) -> tuple[int, int]:
    """Find the op that needs most bytes in every schedule.

    Returns:
        Bytes above the step's start, and the index of the op that pins them (the number of ops for the end).
    """
    return floor_where(program, np.zeros(len(program.buffers), np.bool_))


def floor_where(program: Program, leaves: NDArray[np.bool_]) -> tuple[int, int]:
    """The floor where some buffers may leave for another tier.

    Args:
        program: any.
        leaves: shape ``(buffers,)``: which.

    Returns:
        As :func:`floor_bytes`.
    """
    form, n, boundary = flat(program), len(program.ops), program.boundary
    size, last, made_by = form.bytes, form.last_readers(), form.producer
    stays = form.pinned | form.mutation
    single = ~(stays | leaves)
    held_once = np.flatnonzero(single & ~form.rerunnable[made_by] & (made_by < last))
    too_late = form.rerunnable & form.reads_mutated & (np.arange(n) < boundary)
    held_late = np.flatnonzero(single & too_late[made_by] & (last >= boundary))
    stays = np.flatnonzero(stays & (made_by >= 0))
    change = np.zeros(n + 2, np.int64)  # of clauses 1 and 3
    np.add.at(change, made_by[stays] + 1, size[stays])
    np.add.at(change, made_by[held_once] + 1, size[held_once])
    np.subtract.at(change, last[held_once] + 1, size[held_once])
    np.subtract.at(change, last[held_late] + 1, size[held_late])
    change[boundary] += size[held_late].sum() + program.late_bytes - size[form.mutation].sum()
    held = np.cumsum(change)
    counted = form.pinned.copy()
    counted[held_once] = True
    late = np.zeros(len(size), np.bool_)
    late[held_late] = True
    reads = form.reads
    besides = ~counted[reads.items] & ~(late[reads.items] & (reads.owner >= boundary))
    total = held[:n] + form.made_bytes + form.workspace_bytes
    np.add.at(total, reads.owner[besides], size[reads.items[besides]])
    total = np.append(total, held[n])
    total[boundary] = max(total[boundary], held[boundary] + program.between_excess_bytes)
    most = int(total.argmax())
    return (int(total[most]), most) if total[most] > 0 else (0, 0)
