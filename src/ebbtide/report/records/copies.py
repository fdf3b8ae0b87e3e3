"""When each buffer of a schedule is in memory: its copies, from the action that makes one to the one that frees it.

Definitions:
1. A *copy* of a buffer lives from the action that makes it to the one that frees it, or to the step's end. Runs that
   make it only to drop it at once (for a sibling's sake) make no copy.
2. The bytes of all copies that live after an action are ``Timeline.live_bytes`` of it, less what user code holds after
   the boundary and the generator states that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.step.program import Program
from ebbtide.step.schedule import Compute, Free, Offload, Reload, Schedule, kept_outputs

__all__ = ["Copy", "copies_of"]


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a buffer (definition 1), by indices of actions; ``end`` is the number of actions for the step's end."""

    start: int
    end: int


def copies_of(program: Program, schedule: Schedule) -> list[list[Copy]]:
    """Per buffer, its copies in order."""
    copies: list[list[Copy]] = [[] for _ in program.buffers]
    since: dict[int, int] = {}
    kept = kept_outputs(program, schedule)

    def end(buffer: int, index: int) -> None:
        if buffer in since:
            copies[buffer].append(Copy(since.pop(buffer), index))

    for index, action in enumerate(schedule.actions):
        match action:
            case Compute(_):
                for b in kept[index]:
                    since.setdefault(b, index)
            case Free(buffer):
                end(buffer, index)
            case Reload(buffer):
                since.setdefault(buffer, index)
            case Offload():
                pass
            case _:  # the boundary
                for b in program.mutations:
                    end(b, index)
                for b in program.tangents:
                    since[b] = index
    for b in list(since):
        end(b, len(schedule.actions))
    return copies
