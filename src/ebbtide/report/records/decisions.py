"""What a plan does with each buffer, and what of the program leaves it no choice.

Definitions:
1. A buffer is *held* if it stays to the step's end whatever the plan: an output of the forward, a gradient, a tangent.
2. A buffer with one copy is *kept* if that copy crosses the boundary, and *temporary* if not. With several it is
   *recomputed*, *moved* or both, by what brings the later ones.
3. A buffer that an op of a rewrite makes is *rewritten*, whatever else happens to it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from ebbtide.report.records.copies import Copy
from ebbtide.step.op_traits import is_rewrite_op
from ebbtide.step.program import Program, analysis
from ebbtide.step.schedule import Action, Boundary, Reload, Schedule

__all__ = ["Decision", "Why", "decisions_of", "why_of"]


class Decision(enum.Enum):
    """What happens to a buffer; the value is the word for people."""

    KEPT = "kept"
    RECOMPUTED = "recomputed"
    MOVED = "moved"
    MOVED_AND_RECOMPUTED = "moved, recomputed"
    REWRITTEN = "rewritten"
    TEMPORARY = "temporary"
    HELD = "held"
    COPIED_BACK = "copied back"
    DROPPED = "dropped at once"


class Why(enum.Enum):
    """What the program says of a buffer, whatever the plan; ``{op}`` is the name of the op that makes it."""

    TANGENT = "a tangent is held from the boundary to the end of the step"
    OUTPUT = "an output of the forward is held to the end of the step"
    GRADIENT = "a gradient exists at the end of the step"
    COPIED_BACK = "the boundary copies it into a parameter or input"
    ONCE = "{op} may not run again, so it is kept until its last reader"
    NOT_REMADE = "a rerun of {op} does not make it"
    CHANGED = "{op} may not run after the boundary, which changes what it reads"
    RANDOM = "a rerun of {op} replays {state} of generator state"


def why_of(program: Program, buffer: int) -> tuple[Why, ...]:
    """What of ``program`` holds for ``buffer``; most buffers have nothing."""
    producer = program.buffers[buffer].producer
    if producer is None:
        return (Why.TANGENT,)
    op = program.ops[producer]
    found = [why for why, buffers in _stays(program).items() if buffer in buffers]
    if not op.rerunnable:
        found.append(Why.ONCE)
    elif buffer not in program.made_by_rerun(producer):
        found.append(Why.NOT_REMADE)
    elif op.reads_mutated:
        found.append(Why.CHANGED)
    elif op.random:
        found.append(Why.RANDOM)
    return tuple(found)


@analysis
def _stays(program: Program) -> dict[Why, frozenset[int]]:
    """Buffers that stay for a while whatever the plan, by why."""
    return {
        Why.OUTPUT: frozenset(program.forward_outputs),
        Why.GRADIENT: frozenset(program.gradients),
        Why.COPIED_BACK: frozenset(program.mutations),
    }


def decisions_of(
    program: Program, schedule: Schedule, copies: Sequence[Sequence[Copy]], *, rewritten: bool
) -> list[Decision]:
    """Per buffer, what ``schedule`` does with it.

    Args:
        program: what is planned.
        schedule: the plan's.
        copies: of each buffer, as :func:`~ebbtide.report.records.copies.copies_of` gives them.
        rewritten: whether the program is a rewritten one.
    """
    actions = schedule.actions
    boundary = next((i for i, action in enumerate(actions) if isinstance(action, Boundary)), len(actions))

    def decided(buffer: int) -> Decision:
        producer = program.buffers[buffer].producer
        if rewritten and producer is not None and is_rewrite_op(program.ops[producer].target):
            return Decision.REWRITTEN
        own = copies[buffer]
        if len(own) > 1:
            return _brought([actions[copy.start] for copy in own[1:]])
        if buffer in program.pinned:
            return Decision.HELD
        if buffer in _stays(program)[Why.COPIED_BACK]:
            return Decision.COPIED_BACK
        if not own:
            return Decision.DROPPED
        return Decision.KEPT if own[0].start < boundary < own[0].end else Decision.TEMPORARY

    return [decided(buffer) for buffer in range(len(program.buffers))]


def _brought(later: Sequence[Action]) -> Decision:
    """By what the later copies of a buffer come: definition 2."""
    reloads = [isinstance(action, Reload) for action in later]
    if all(reloads):
        return Decision.MOVED
    return Decision.MOVED_AND_RECOMPUTED if any(reloads) else Decision.RECOMPUTED
