"""What is live during one action of a schedule, buffer by buffer: the simulator's bytes, with names.

The simulator gives one number per action. A :class:`Moment` says which buffers and what else that number is; its
parts add up to ``Timeline.peak_bytes`` of the action exactly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ebbtide.step.program import Program
from ebbtide.step.schedule import Boundary, Compute, Free, Reload, Schedule, kept_outputs

__all__ = ["Moment", "moment_at"]


@dataclass(frozen=True, slots=True)
class Moment:
    """The most that is live during one action.

    Attributes:
        action: its index in the schedule.
        op: the op that runs, or ``None``.
        buffers: all that are live, ascending, those that the op makes among them.
        workspace_bytes: of the op.
        copy_bytes: results of a rerun that are there already, until the rerun ends.
        state_bytes: generator states that reruns of random ops need.
        user_bytes: what user code takes at the boundary and holds after it.
    """

    action: int
    op: int | None
    buffers: tuple[int, ...]
    workspace_bytes: int = 0
    copy_bytes: int = 0
    state_bytes: int = 0
    user_bytes: int = 0

    def bytes(self, program: Program) -> int:
        """All of it, bytes above the step's start."""
        rest = self.workspace_bytes + self.copy_bytes + self.state_bytes + self.user_bytes
        return rest + sum(program.buffers[b].bytes for b in self.buffers)


def moment_at(program: Program, schedule: Schedule, index: int) -> Moment:
    """What is live during action ``index`` of ``schedule``, which must be legal."""
    kept = kept_outputs(program, schedule)
    runs_to_come = Counter(schedule.computes)
    ran: set[int] = set()
    live: set[int] = set()
    states: set[int] = set()  # random ops whose generator state is held
    user_bytes = 0
    for position, action in enumerate(schedule.actions[: index + 1]):
        here = position == index
        match action:
            case Compute(o):
                op = program.ops[o]
                again = o in ran
                if op.random and (again or runs_to_come[o] > 1):
                    states.add(o)
                if here:
                    made = program.made_by_rerun(o) if again else op.outputs
                    return Moment(
                        action=index,
                        op=o,
                        buffers=tuple(sorted(live.union(made))),
                        workspace_bytes=op.workspace_bytes,
                        copy_bytes=sum(program.buffers[b].bytes for b in made if b in live),
                        state_bytes=_state_bytes(program, states) + (op.state_bytes if again else 0),
                        user_bytes=user_bytes,
                    )
                ran.add(o)
                live.update(kept[position])
                runs_to_come[o] -= 1
                if not runs_to_come[o]:
                    states.discard(o)
            case Free(buffer):
                live.discard(buffer)
            case Reload(buffer):
                live.add(buffer)
            case Boundary():
                live.difference_update(program.mutations)
                live.update(program.tangents)
                user_bytes = program.held_bytes + (program.between_excess_bytes if here else 0)
            case _:
                pass
    state_bytes = _state_bytes(program, states)
    return Moment(index, None, tuple(sorted(live)), state_bytes=state_bytes, user_bytes=user_bytes)


def _state_bytes(program: Program, ops: set[int]) -> int:
    return sum(program.ops[o].state_bytes for o in ops)
