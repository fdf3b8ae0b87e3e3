"""A program with its first runs in another order, and the way back for its schedules.

It has the same ops and buffers, so nothing about it is smaller. It is easier in that planners which keep to the
captured order of first runs then plan in the new one. A schedule takes the same bytes and seconds in both programs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbtide.planners.base import Problem
from ebbtide.planners.reductions.base import Reduced
from ebbtide.planners.search.interval_state import reruns_of
from ebbtide.planners.search.orders import Order
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule

__all__ = ["Reordered", "reorder"]


@dataclass(frozen=True)
class Reordered:
    """A program in another order.

    Attributes:
        original: the program as captured.
        program: the same ops and buffers (by the same indices of buffers) in the new order.
        new: per op of the original, its index in the new program.
    """

    original: Program
    program: Program
    new: tuple[int, ...]

    def reduce(self, problem: Problem) -> Reduced[Schedule]:
        """The problem in the new order, with those of its seeds whose ops first run in that order.

        Where their boundary is does not matter: seeds are start points.
        """
        there = (
            Schedule.from_computes(self.program, [None if op is None else self.new[op] for op in seed.computes])
            for seed in problem.seeds
        )
        seeds = tuple(seed for seed in there if reruns_of(self.program, seed) is not None)
        return Reduced(replace(problem, program=self.program, seeds=seeds), self.lift)

    def lift(self, schedule: Schedule) -> Schedule:
        """A schedule of the reordered program as one of the original."""
        old = {index: op for op, index in enumerate(self.new)}
        order = [None if op is None else old[op] for op in schedule.computes]
        return Schedule.from_computes(self.original, order)


def reorder(program: Program, order: Order) -> Reordered:
    """``program`` with its first runs in ``order``.

    Args:
        program: any.
        order: every op once and ``None`` at the boundary, as clauses 1 and 2 of legality allow.
    """
    ops = [op for op in order if op is not None]
    new = [0] * len(ops)
    for index, op in enumerate(ops):
        new[op] = index
    buffers = tuple(b if b.producer is None else replace(b, producer=new[b.producer]) for b in program.buffers)
    moved = replace(program, ops=tuple(program.ops[op] for op in ops), buffers=buffers, boundary=order.index(None))
    return Reordered(program, moved, tuple(new))
