"""Reruns of one program as those of another that is of the same step but for a few ops, told by their names."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.step.program import Program

__all__ = ["carried"]


def carried(of: Program, reruns: Sequence[tuple[int, int]], to: Program) -> list[tuple[int, int]]:
    """``reruns`` of one program as far as another has their ops, ascending by stage, then op.

    A stage that the other has not is the next one that it has.

    Args:
        of: whose they are.
        reruns: as ``(op, stage)``.
        to: the other.
    """
    index = {op.name: i for i, op in enumerate(to.ops)}
    nothing = len(to.ops)
    stages = [nothing] * (len(of.ops) + 1)
    for i in range(len(of.ops) - 1, -1, -1):
        stages[i] = index.get(of.ops[i].name, stages[i + 1])
    found = {
        (stages[stage], index[name])
        for op, stage in reruns
        if (name := of.ops[op].name) in index and stage < len(of.ops)
    }
    return [(op, stage) for stage, op in sorted(found) if stage < nothing and op < stage]
