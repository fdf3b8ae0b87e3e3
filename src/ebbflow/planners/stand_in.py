"""A large program's small stand-in: the same with few of its repeated blocks, planned in its place.

Plans of the stand-in are carried to the program (``repeats``) and are start points there: they are repaired to the
budget and searched on like any other. What is gained is that the search for a pattern of blocks takes the same time
however many blocks there are. No bound is carried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ebbflow.planners.base import LARGE_OPS
from ebbflow.planners.interval_state import reruns_of
from ebbflow.planners.repeats import Repeats, Tiled, carry, find_repeats, with_blocks
from ebbflow.program import Program, analysis
from ebbflow.schedule import Schedule

__all__ = ["StandIn", "stand_in_of"]

OPS = 600  # wanted of a stand-in: as many as a search covers in a second
LEAST_BLOCKS = 8
FEWER = 3  # how many times fewer blocks a stand-in has at least
EDGE = 2  # blocks at either end that stand for themselves


@dataclass(frozen=True)
class StandIn:
    """A small program that stands for a large one.

    Attributes:
        whole: the regions of the large program.
        small: the small program with its regions.
    """

    whole: Repeats
    small: Tiled

    @property
    def program(self) -> Program:
        """The small program."""
        return self.small.program

    def carried(self, schedule: Schedule) -> Iterator[list[tuple[int, int]]]:
        """Reruns ``(op, stage)`` of the large program from a schedule of the small one, in each way there is.

        1. Blocks in the middle are stretched: each stands for several neighbours. Right where blocks are independent.
        2. Blocks in the middle are repeated as a group. Right where they share a checkpoint.
        """
        reruns = reruns_of(self.program, schedule)
        if reruns is None:
            return
        blocks, few = self.whole.blocks, self.small.repeats.blocks
        middle, inner = blocks - 2 * EDGE, few - 2 * EDGE
        ends = list(range(EDGE)), list(range(few - EDGE, few))
        for each in ([j * inner // middle for j in range(middle)], [j % inner for j in range(middle)]):
            stands_for = [*ends[0], *(EDGE + j for j in each), *ends[1]]
            yield carry(reruns, self.small.repeats, self.whole, stands_for)


@analysis
def stand_in_of(program: Program) -> StandIn | None:
    """A stand-in; ``None`` for programs that are small, or have too few repeated blocks."""
    if len(program.ops) < LARGE_OPS:
        return None
    whole = find_repeats(program)
    if whole is None:
        return None
    per_block = sum(region.period for region in whole.regions)
    fixed = len(program.ops) - per_block * whole.blocks
    few = max(LEAST_BLOCKS, round((OPS - fixed) / per_block))
    if few * FEWER > whole.blocks:
        return None
    return StandIn(whole, with_blocks(whole, few))
