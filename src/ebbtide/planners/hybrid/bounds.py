"""Bounds of a program whose buffers may move, from few cuts to many, and the start points that come with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ebbtide.planners.base import LARGE_OPS, Interrupt
from ebbtide.planners.bounds.cut_bound import CUTS, OP_CUTS, PERCENT, WORK, CutSolved
from ebbtide.planners.hybrid.choice import Choice
from ebbtide.planners.hybrid.cut_lanes import GAP, LaneModel
from ebbtide.planners.hybrid.rounding import looked_at, rounded
from ebbtide.planners.hybrid.whole_lanes import WholeModel
from ebbtide.planners.search.orders import CapturedOrder
from ebbtide.step.machine import Link
from ebbtide.step.program import Program

__all__ = ["LaneBound", "lane_bounds"]

CLOSE = 1e-3  # a plan within the budget whose overhead is this near the bound needs no further cut
WHOLE_OPS, ORDERED_OPS = 16, 10  # of programs that are solved whole, and with the order of runs in each span
SECOND_CUT_OPS = 20_000  # up to which a large program's second cut takes some ten seconds
ENTRIES = 40_000  # of the largest such model: with more, a round of the solver takes a tenth of a second
WHOLE_SHARE = 2  # of the work is left for it, whatever the cuts took


@dataclass(frozen=True)
class LaneBound:
    """What the relaxation says after a number of cuts.

    Attributes:
        bound: proven lower bound on the overhead, a fraction; the best so far.
        infeasible: whether no schedule fits the budget, proven.
        choice: its solution, rounded, to be repaired: it may be over the budget elsewhere. ``None`` if there is none.
        work: what all rounds together have taken, as ``bounds.cut_bound`` counts it.
    """

    bound: float
    infeasible: bool
    choice: Choice | None = None
    work: int = 0


def lane_bounds(
    program: Program,
    above_budget_bytes: int,
    links: Mapping[str, Link],
    interrupt: Interrupt,
    *,
    work: int = WORK,
    enough: Callable[[], float] = lambda: math.inf,
) -> Iterator[LaneBound]:
    """Bounds of a program at a budget, cut by cut, each at least as high as the one before; none if nothing is over.

    The first cut is solved in linear relaxation and then, unless that plan is as good as its bound, in whole numbers.
    The next cut is placed at the fullest stage of the last plan, if that is over the budget or much slower than the
    bound. A small program is solved whole in the end (``whole_lanes``), unless the bound is reached.

    Args:
        program: with costs.
        above_budget_bytes: that the step may take above its start.
        links: to the tiers that there are, by tier.
        interrupt: when to stop with what is known.
        work: what all rounds together may take.
        enough: asked for an overhead that is known to be possible: a bound that reaches it ends the search.
    """
    last = LaneBound(0.0, infeasible=False)
    for last in _cut_by_cut(program, above_budget_bytes, links, interrupt, work=work, enough=enough):
        yield last
    if last.choice is None or last.bound >= enough() or interrupt or len(program.ops) > WHOLE_OPS:
        return
    taken, overhead = looked_at(program, last.choice, links)
    if taken.max() <= above_budget_bytes and overhead - last.bound <= CLOSE:
        return
    ordered = len(program.ops) <= ORDERED_OPS
    model = WholeModel(program, above_budget_bytes, links, ordered=ordered)
    if model.model.entries > ENTRIES:
        return
    solved = model.solve(interrupt, max(work - last.work, work // WHOLE_SHARE), enough())
    bound = max(last.bound, solved.bound)
    choice = None if solved.reruns is None else _choice(program, links, model, solved)
    yield LaneBound(bound, solved.infeasible, choice, last.work + solved.work)


def _choice(program: Program, links: Mapping[str, Link], model: LaneModel, solved: CutSolved) -> Choice:
    """The rounded solution of a model."""
    loads = [] if solved.values is None else model.loads(solved.values)
    return rounded(program, links, model.cuts, solved.reruns or [], loads)


def _most_cuts(ops: int) -> int:
    """How many cuts are worth their time; of a large program a second one, since annealing mends little there."""
    return max(OP_CUTS // ops, 2 if LARGE_OPS <= ops <= SECOND_CUT_OPS else 1)


def _cut_by_cut(
    program: Program,
    above_budget_bytes: int,
    links: Mapping[str, Link],
    interrupt: Interrupt,
    *,
    work: int,
    enough: Callable[[], float],
) -> Iterator[LaneBound]:
    """Bounds from a few cuts; arguments as :func:`lane_bounds`."""
    order = CapturedOrder(program)
    choice, cuts = Choice(), list[int]()
    bound, left = 0.0, work
    most = min(CUTS, len(program.ops), _most_cuts(len(program.ops)))
    while len(cuts) < most:
        taken, overhead = looked_at(program, choice, links)
        taken[cuts] = 0
        stage = int(taken.argmax())
        if taken[stage] <= above_budget_bytes and overhead - bound <= CLOSE:
            return
        cuts = sorted([*cuts, stage])
        model = LaneModel(program, above_budget_bytes, cuts, order, links)
        if model.may_merge:
            model.merge()
        for whole in (False, True) if len(cuts) == 1 and len(program.ops) < LARGE_OPS else (True,):
            if left <= 0 or bound >= enough() or interrupt:
                return
            solved = model.solve(interrupt, left, enough(), whole=whole)
            left -= solved.work
            bound = max(bound, solved.bound)
            if solved.reruns is None:
                yield LaneBound(bound, solved.infeasible, None, work - left)
                return
            choice = _choice(program, links, model, solved)
            yield LaneBound(bound, solved.infeasible, choice, work - left)
            if not whole:
                taken, overhead = looked_at(program, choice, links)
                if taken.max() <= above_budget_bytes and overhead - bound <= GAP / PERCENT:
                    return
