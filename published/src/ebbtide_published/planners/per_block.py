"""Checkpointed blocks, as people write them with ``torch.utils.checkpoint``: as few as the budget needs.

Definitions:
1. A *block* is a module of a list: of an op's module path the shortest beginning that ends in a number and whose
   list (the path before that number) has issued ops of the forward under more than one number, for example
   ``model.layers.3``. Its ops are the forward's ops under it, up to the next op of another block: a module that is
   called twice is two blocks.
2. Where no op has a block (graphs without modules, models without lists) the blocks are the segments that
   ``ap_sqrt`` makes, and what follows the last.
3. A *checkpointed* block keeps what the rest of the forward reads of it. Everything else is dropped when the forward
   has read it last and made again when the backward first reads something of the block (``segments``, definition
   3), as ``torch.utils.checkpoint`` does; what lies outside of blocks is kept.

The first ``k`` blocks are checkpointed, with the least ``k`` that fits: the last blocks' buffers are the first to
be read, so that dropping them gains least. ``torch.utils.checkpoint`` runs the whole block again (or up to
the last buffer that is needed); here only what the backward reads is made again, with what that needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.planners.base import Answer, Problem, Status
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.registry import planner
from ebbtide.step.program import Program
from ebbtide.units import format_count
from ebbtide_published.planners.chen import sqrt_checkpoints
from ebbtide_published.planners.segments import Trials, articulation_points, residents_of_segments, segments_between

__all__ = ["blocks_of", "per_block", "read_outside"]

STRIDES = 16  # numbers of blocks tried before the last stride is searched one by one


@planner("per_block")
def per_block(problem: Problem) -> Answer:
    """The first blocks checkpointed, as many as are needed."""
    if (unplanned := keep_all(problem)).status is Status.OPTIMAL:
        return unplanned
    program = problem.program
    block = blocks_of(program)
    kept = read_outside(program, block)
    count = max(block, default=-1) + 1
    trials = Trials(problem)

    def fits(first: int) -> bool:
        segments = [number if number < first else -1 for number in block]
        over, _ = trials.measure(
            f"{first} of {format_count(count, 'block')}", residents_of_segments(program, segments, kept)
        )
        return not over

    stride = -(-count // STRIDES)
    tried = 0
    while tried < count and not problem.interrupt:
        first = min(tried + stride, count)
        if fits(first):
            for fewer in range(tried + 1, first):
                if problem.interrupt or fits(fewer):
                    break
            break
        tried = first
    return trials.answer()


def blocks_of(program: Program) -> list[int]:
    """The block of every forward op, numbered from 0 in captured order; -1 where there is none."""
    names = _block_names(program)
    if not any(names):
        return _between_articulation_points(program)
    found: list[int] = []
    number, current = -1, ""
    for name in names:
        if name and name != current:
            number, current = number + 1, name
        found.append(number if name else -1)
    return found


def _block_names(program: Program) -> list[str]:
    """The block of every forward op by its module's path, ``""`` where there is none (definition 1)."""
    paths = [op.module.split(".") for op in program.ops[: program.boundary]]
    members: dict[tuple[str, ...], set[str]] = {}
    for path in paths:
        for depth, part in enumerate(path):
            if part.isdigit():
                members.setdefault(tuple(path[:depth]), set()).add(part)
    names: list[str] = []
    for path in paths:
        depths = (d for d, part in enumerate(path) if part.isdigit() and len(members[tuple(path[:d])]) > 1)
        depth = next(depths, None)
        names.append("" if depth is None else ".".join(path[: depth + 1]))
    return names


def _between_articulation_points(program: Program) -> list[int]:
    """Blocks of a graph without modules (definition 2)."""
    checkpoints = sqrt_checkpoints(articulation_points(program))
    segments = segments_between(program, checkpoints)
    last = max(checkpoints, default=-1)
    number = max(segments, default=-1) + 1
    return [number if op > last else segment for op, segment in enumerate(segments)]


def read_outside(program: Program, block: Sequence[int]) -> frozenset[int]:
    """Forward buffers that a forward op of another block, or of none, reads (definition 3)."""
    return frozenset(
        b
        for index, op in enumerate(program.ops[: program.boundary])
        for b in op.outputs
        if any(block[r] != block[index] for r in program.readers[b] if r < program.boundary)
    )
