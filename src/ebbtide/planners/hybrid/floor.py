"""A proven lower bound on the peak of any schedule that may recompute and move buffers.

It assumes first runs in captured order and the boundary where it was captured, and that outputs and mutations, once
made, stay (a mutation until the boundary). Of links it assumes only which sizes of buffer they take: seconds, and how
much a tier holds in all, are no part of it. At the first run of op ``t`` these bytes are live:
1. outputs of the program made before ``t`` and, from the boundary on, the tangents and what user code holds; up to
   the boundary, mutations: none of them may be moved;
2. what ``t`` reads, its workspace and everything it makes;
3. results that somebody reads after ``t`` and that can neither leave nor be made again: of ops that may not run again
   (or not after the boundary), and not movable or smaller than any link takes.

Where every buffer may be moved this is the least peak: each result leaves when it is made, and is back while an op
reads it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ebbtide.planners.bounds.floor import floor_where
from ebbtide.step.machine import Link
from ebbtide.step.program import Program

__all__ = ["floor_with_tiers", "tiers_of"]


def floor_with_tiers(program: Program, links: Mapping[str, Link] | None = None) -> tuple[int, int]:
    """The floor of a program whose buffers may leave.

    Args:
        program: any.
        links: to the tiers that there are; one that takes buffers of any size if ``None``.

    Returns:
        Bytes above the step's start, and the index of the op that pins them (the number of ops for the end).
    """
    leaves = np.zeros(len(program.buffers), np.bool_)
    leaves[[b for b in program.movable if links is None or tiers_of(program, b, links)]] = True
    return floor_where(program, leaves)


def tiers_of(program: Program, buffer: int, links: Mapping[str, Link]) -> tuple[str, ...]:
    """The tiers that take ``buffer``, by name; none if it may not be moved."""
    if buffer not in program.movable:
        return ()
    size = program.buffers[buffer].bytes
    takes = (t for t, each in links.items() if size >= each.least_bytes and each.round_up(size) <= each.capacity_bytes)
    return tuple(sorted(takes))
