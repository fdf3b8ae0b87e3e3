"""The contract of a reduction: a problem that is easier to plan, and the way back for its schedules.

1. A reduction is made from a program (the *whole*) and holds another (*reduced*) one that stands for it. It never
   changes the whole, and is made again from it at will: nothing is learned from the problems it is asked about.
2. :meth:`Reduction.reduce` takes any problem of the whole and gives one of the reduced program: with a budget that
   means as much there, and with those seeds that the reduction can translate: start points, not always legal. Machine,
   effort, seed of randomness, interrupt and progress are the problem's own; who plans for a start point only silences
   it.
3. ``lift`` takes a legal schedule of the reduced program that moves no buffers. It need not fit any budget.
4. What ``lift`` gives back says what it guarantees. A **schedule** is legal for the whole, takes as many seconds as the
   reduced one and at no point more bytes, so that one that fits there fits here. **Start points** are sets of reruns,
   each to be repaired to the budget: they may be over it.
5. A bound on the reduced problem is none on the whole, unless the reduction says so (``Coarse.keeps_optimum``).

=============================  =======================================  =================
reduction                      reduced program                          ``lift`` gives
=============================  =======================================  =================
``coarsen.Coarse``             ops stand for several ops                a schedule
``reorder.Reordered``          the same ops in another order            a schedule
``proxy.Proxy``                few of many repeated blocks              start points
=============================  =======================================  =================

``coarse_starts`` and ``starts`` are uses of these: which reductions to plan, with how much effort. ``repeats`` is what
``proxy`` is made of. ``adapt`` is none: it takes schedules of other programs to the problem that is asked, which stays
as large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ebbtide.planners.base import Problem
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule

__all__ = ["ExactReduction", "Reduced", "Reduction", "StartReduction"]

Lifted = TypeVar("Lifted")


@dataclass(frozen=True)
class Reduced(Generic[Lifted]):
    """A problem to plan instead of another, and the way back.

    Attributes:
        problem: of the reduced program.
        lift: what a schedule of it is in the whole (definitions 3 and 4).
    """

    problem: Problem
    lift: Callable[[Schedule], Lifted]


class Reduction(Protocol[Lifted]):
    """A program that stands for another one."""

    @property
    def program(self) -> Program:
        """The reduced program."""
        ...

    def reduce(self, problem: Problem) -> Reduced[Lifted]:
        """The problem to plan instead of one of the whole (definition 2)."""
        ...

    def lift(self, schedule: Schedule) -> Lifted:
        """Take a schedule of the reduced program back to the whole (definitions 3 and 4)."""
        ...


ExactReduction = Reduction[Schedule]
"""One whose schedules are schedules of the whole."""
StartReduction = Reduction[Iterator[list[tuple[int, int]]]]
"""One whose schedules are start points: sets of reruns ``(op, stage)``, in each way that there is."""
