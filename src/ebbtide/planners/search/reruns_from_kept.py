"""From what is kept between stages to the fewest reruns that serve it (Checkmate, §4.6 and §5.2: R from S).

Definitions:
1. *Residents* say for every stage ``t`` (``interval_kernels``, definition 1) which buffers are to be resident when it
   begins, besides those that have to be: pinned ones, and those that may not be made again there and are still read.
2. The *reruns* for residents are, per stage, the least set that lets the stage's op read its inputs and the next stage
   find its residents: whatever is missing is made again in the stage, with all that it reads in turn. No schedule
   with the same residents runs fewer ops.

What is kept besides (an interval ends at its last read) costs nothing here: the interval state
measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ebbtide.step.program import Program

__all__ = ["Residents", "last_rerun_stage", "reruns_for_residents"]

Residents = Callable[[int], Iterable[int]]
"""Definition 1: per stage, buffers."""


def last_rerun_stage(program: Program, op: int) -> int:
    """The last stage at which ``op`` may run again; ``op`` itself if it may not."""
    if not program.ops[op].rerunnable:
        return op
    return program.boundary - 1 if program.ops[op].reads_mutated else len(program.ops) - 1


def reruns_for_residents(program: Program, residents: Residents) -> list[tuple[int, int]]:
    """The reruns ``(op, stage)`` for residents, ascending by stage, then op (definition 2).

    Args:
        program: any.
        residents: per stage, the buffers to be resident when it begins; those made later are ignored.
    """
    ops, pinned = program.ops, program.pinned
    limit = [last_rerun_stage(program, o) for o in range(len(ops))]
    last_read = [max(readers, default=-1) for readers in program.readers]
    # A buffer that no op makes is made before no stage: it is there anyway.
    made = [len(ops) if b.producer is None else b.producer for b in program.buffers]

    def old(t: int) -> set[int]:
        """Residents of stage ``t`` that were made before it."""
        return {b for b in residents(t) if made[b] < t}

    reruns: list[tuple[int, int]] = []
    here = old(0)
    for t, op in enumerate(ops):
        following = old(t + 1) if t + 1 < len(ops) else set[int]()
        must: set[int] = set()
        stack = [*op.inputs, *(b for b in following - here if made[b] != t and last_read[b] > t)]
        while stack:
            b = stack.pop()
            o = made[b]
            if o == len(ops) or b in pinned or b in here or o in must:
                continue
            if t > limit[o]:  # its last production is held, a resident or not
                continue
            must.add(o)
            stack.extend(ops[o].inputs)
        must.discard(t)
        reruns.extend((o, t) for o in sorted(must))
        here = following
    return reruns
