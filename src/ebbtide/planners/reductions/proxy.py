"""A large program's proxy: the same program with few of its repeated blocks, planned in its place.

Plans of the proxy program are carried to the program (``repeats``) and are start points there: they are repaired to the
budget and searched on like any other. What is gained is that the search for a pattern of blocks takes the same time
however many blocks there are. No bound is carried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ebbtide.planners.base import LARGE_OPS, Problem
from ebbtide.planners.reductions.base import Reduced
from ebbtide.planners.reductions.repeats import (
    IsomorphicOps,
    Repeats,
    Tiled,
    carry,
    find_repeats,
    isomorphic_ops,
    with_blocks,
)
from ebbtide.planners.search.interval_state import reruns_of
from ebbtide.step.program import Program, analysis
from ebbtide.step.schedule import Schedule
from ebbtide.step.unplanned import unplanned_bytes

__all__ = ["Proxy", "proxy_of"]

OPS = 600  # wanted of a proxy program: as many as a search covers in a second
LEAST_BLOCKS = 8
FEWER = 3  # how many times fewer blocks a proxy program has at least
EDGE = 2  # blocks at either end that stand for themselves


@dataclass(frozen=True)
class Proxy:
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

    def reduce(self, problem: Problem) -> Reduced[Iterator[list[tuple[int, int]]]]:
        """The problem of the small program, with a budget that takes as much of each of its blocks; without seeds."""
        wanted = unplanned_bytes(problem.program) - problem.above_budget_bytes
        budget = unplanned_bytes(self.program) - wanted * self.small.repeats.blocks // self.whole.blocks
        return Reduced(replace(problem, program=self.program, above_budget_bytes=budget, seeds=()), self.lift)

    def lift(self, schedule: Schedule) -> Iterator[list[tuple[int, int]]]:
        """Reruns ``(op, stage)`` of the large program from a schedule of the small one, in each way there is.

        1. Blocks in the middle are stretched: each stands for several neighbours. Right where blocks are independent.
        2. Blocks in the middle are repeated as a group. Right where they share a checkpoint.
        """
        reruns = reruns_of(self.program, schedule)
        if reruns is None:
            return
        for stands_for in (self._stretched(), self._repeated()):
            yield carry(reruns, self.small.repeats, self.whole, stands_for)

    def isomorphic_ops(self) -> IsomorphicOps:
        """Ops and buffers that stand for each other where the blocks in the middle are repeated as a group."""
        return isomorphic_ops(self.small.repeats, self.whole, self._repeated())

    def _stretched(self) -> list[int]:
        middle, inner = self._middle()
        return self._with_ends(j * inner // middle for j in range(middle))

    def _repeated(self) -> list[int]:
        middle, inner = self._middle()
        return self._with_ends(j % inner for j in range(middle))

    def _middle(self) -> tuple[int, int]:
        """How many blocks in the middle the large and the small program have."""
        return self.whole.blocks - 2 * EDGE, self.small.repeats.blocks - 2 * EDGE

    def _with_ends(self, middle: Iterable[int]) -> list[int]:
        """The block that stands for each block of the large program, given those for the blocks in the middle."""
        few = self.small.repeats.blocks
        return [*range(EDGE), *(EDGE + j for j in middle), *range(few - EDGE, few)]


@analysis
def proxy_of(program: Program) -> Proxy | None:
    """A proxy program; ``None`` for programs that are small, or have too few repeated blocks."""
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
    return Proxy(whole, with_blocks(whole, few))
