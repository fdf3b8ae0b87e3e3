"""The cut relaxation: a proven lower bound on the overhead at a budget, and start points, from a few stages.

Fix stages ``t_1 < .. < t_m``, the *cuts*. Variables, all 0 or 1:
1. ``keep[j, b]``: buffer ``b``, made before ``t_j`` and not pinned, is resident while op ``t_j`` first runs.
2. ``rerun[j, i]``: op ``i <= t_j`` runs again between the first run of ``t_j`` and that of ``t_(j+1)`` (or the end).

Blocks of rows, each true of every legal schedule that runs first computes in captured order:
3. *bytes*: what is kept at ``t_j``, the pinned buffers made before it, the generator states of random ops that run
   again after it, workspace and outputs of ``t_j`` are within the budget; what ``t_j`` reads is kept.
4. *reads*: an op whose first run lies in span ``j`` finds each input made at or before ``t_j`` kept at ``t_j`` or
   made again in the span; so does every op that is rerun there. Outputs of ``t_j`` itself are taken as kept.
5. *carry*: what is kept at ``t_(j+1)`` and was made before ``t_j`` was kept at ``t_j`` or made again in between.
6. *merged*: blocks 4 and 5 hold as well for several spans taken as one, where an op counts as rerun if it is rerun in
   any of them. In whole numbers that says nothing new. In the linear relaxation it does: there, halves of an op could
   be rerun in two spans with half of its inputs made again once, and more cuts gave a lower bound than one.

In any other legal order the same holds with *before* and *after* read as "in every legal order": cuts are then ops of
which one always runs before the other, spans hold the ops that always run between two of them, and only buffers
whose op always ran before a cut can be old there (``orders.FreeOrder``).

The least cost of reruns is therefore a bound: dropping rows (every stage that is no cut, how often an op runs in
one span, reruns of ops that are new in the span) can only make it smaller. The dual bound is taken, never the
value of a solution. Where bytes overflow in the plan of the solution, which is where its recomputation chains peak, a
further cut is placed and the model solved again. Solver: HiGHS, in this process, one thread, interruptible.

Work is counted, not timed, so that plans are reproducible (docs/adr/0012): how often the solver asks whether to go on
(after every node, round of cutting planes and dive), times the rows of the model; at least :data:`LEAST_ROWS` where
there are several cuts, whose rounds take 10 to 30 milliseconds however few rows there are. A unit is 3 to 12
microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ebbtide.planners.base import LARGE_OPS, Interrupt
from ebbtide.planners.bounds.cut_basis import CutBasis, Names, Start
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.planners.search.orders import CapturedOrder
from ebbtide.planners.solvers.highs import ROOM, Model, solve
from ebbtide.step.program import Program

__all__ = ["CutBound", "CutModel", "CutSolved", "cut_bound", "cut_bounds", "quick_bound"]

WORK = 300_000  # for all cuts together: one to two seconds
LEAST_ROWS = 2_000
SECONDS = 60.0  # only so that nothing hangs: a clock that ended solves would make plans depend on the machine
CUTS = 8
MERGED_CUTS, MERGED_ROWS = 2, 1_000  # cuts, and rows without merging, up to which spans are merged (block 6)
OP_CUTS = 1_700  # ops times cuts up to which further cuts are placed: beyond, one of them takes longer than it is worth
PERCENT = 100.0  # objective in percent of the unplanned step: HiGHS' tolerances are absolute
SAFETY = 1e-6  # taken off the bound, in percent: HiGHS' own feasibility and optimality tolerance is 1e-7


@dataclass(frozen=True)
class CutBound:
    """What the relaxation says after a number of cuts.

    Attributes:
        bound: proven lower bound on the overhead, a fraction; the best so far.
        infeasible: whether no schedule in captured order fits the budget, proven.
        cuts: how many cuts the last model had.
        reruns: ``(op, stage)`` of its solution, to be repaired: it may be over the budget elsewhere. ``None`` if the
            solver found none.
        work: what all rounds together have taken.
        basis: of a linear relaxation with one cut, its optimal one.
    """

    bound: float
    infeasible: bool
    cuts: int
    reruns: list[tuple[int, int]] | None = None
    work: int = 0
    basis: CutBasis | None = None


def cut_bounds(
    program: Program,
    budget: int,
    interrupt: Interrupt,
    *,
    state: IntervalState,
    work: int = WORK,
    enough: Callable[[], float] = lambda: math.inf,
    order: CapturedOrder | None = None,
    start: Start | None = None,
) -> Iterator[CutBound]:
    """Bounds of a program at a budget, cut by cut, each at least as high as the one before.

    Args:
        program: with costs.
        budget: bytes above the step's start.
        interrupt: when to stop with what is known.
        state: any interval state of the program, used as a workbench: its reruns are replaced, and may be changed
            between two rounds.
        work: what all rounds together may take.
        enough: asked for an overhead that is known to be possible: a bound that reaches it ends the search.
        order: the orders of first runs in which the bound holds; captured order if ``None``.
        start: what a linear relaxation with one cut begins with.
    """
    order = order or CapturedOrder(program)
    bound, left = 0.0, work
    reruns: list[tuple[int, int]] = []
    cuts: list[int] = []
    while len(cuts) < CUTS and left > 0 and bound < enough() and not interrupt:
        if cuts and len(program.ops) * (len(cuts) + 1) > OP_CUTS:
            return
        state.load(reruns)
        over = zip(state.all_stage_bytes().tolist(), range(0, -len(program.ops), -1), strict=False)
        worst, stage = max((each for each in over if all(order.comparable(-each[1], c) for c in cuts)), default=(0, 0))
        if worst <= budget:
            return
        cuts = sorted([*cuts, -stage])
        model = CutModel(program, budget, cuts, order)
        if model.may_merge:
            model.merge()
        solved = model.solve(interrupt, left, enough(), start=start if len(cuts) == 1 else None)
        left -= solved.work
        bound = max(bound, solved.bound)
        yield CutBound(bound, solved.infeasible, len(cuts), solved.reruns, work - left)
        if solved.infeasible or solved.reruns is None:
            return
        reruns = solved.reruns


def cut_bound(program: Program, budget: int) -> CutBound:
    """The last and best of :func:`cut_bounds`."""
    best = CutBound(0.0, False, 0)
    for each in cut_bounds(program, budget, Interrupt(), state=IntervalState(program)):
        best = each
    return best


def quick_bound(program: Program, budget: int, interrupt: Interrupt, state: IntervalState) -> CutBound:
    """The bound of the linear relaxation of one cut, at the unplanned step's peak; arguments as :func:`cut_bounds`."""
    state.load([])
    worst, stage = max(zip(state.all_stage_bytes().tolist(), range(0, -len(program.ops), -1), strict=False))
    if worst <= budget:
        return CutBound(0.0, False, 0)
    solved = CutModel(program, budget, [-stage], CapturedOrder(program)).solve(interrupt, WORK, math.inf, whole=False)
    return CutBound(solved.bound, solved.infeasible, 1, solved.reruns, basis=solved.basis)


@dataclass(frozen=True)
class CutSolved:
    """The solver's answer to one relaxation: as :class:`CutBound`, of this one alone; and the value per column."""

    bound: float
    infeasible: bool
    reruns: list[tuple[int, int]] | None
    work: int = 0
    basis: CutBasis | None = None
    values: NDArray[np.float64] | None = None


class CutModel:
    """The sparse arrays of one relaxation, a method per block of rows."""

    gap = 1e-6  # percent of the step at which a solution counts as the best
    presolved = True  # before branch and bound
    price = 0.0  # the most that columns which cost no time may add to the objective: no part of the bound

    def __init__(self, program: Program, budget: int, cuts: list[int], order: CapturedOrder) -> None:
        self.program = program
        self.order = order
        self.cuts = cuts
        self.budget = budget
        self.model = Model()  # every column from 0, or 1 where the cut op reads the buffer, to 1
        self.keep: list[dict[int, int]] = []  # per cut: buffer -> column
        self.rerun: list[dict[int, int]] = []  # per cut: op -> column
        self.row: list[dict[tuple[int, int], int]] = [{} for _ in cuts]  # per cut: row of blocks 3 and 4
        self.hopeless = False
        self._columns()
        for j in range(len(cuts)):
            self._bytes_row(j)
            self._read_rows(j)
            if j + 1 < len(cuts):
                self._carry_rows(j)

    def _span(self, j: int) -> Collection[int]:
        """Ops whose first run lies in span ``j``."""
        return self.order.between(self.cuts[j], self.cuts[j + 1] if j + 1 < len(self.cuts) else None)

    def _old(self, j: int, b: int) -> bool:
        """Whether reads of ``b`` in span ``j`` are constrained: made before the cut op, and not pinned."""
        return self._before(b, self.cuts[j]) and b not in self.program.pinned

    def _before(self, b: int, t: int) -> bool:
        producer = self.program.buffers[b].producer
        return producer is not None and self.order.before(producer, t)

    def _may_rerun(self, j: int, i: int) -> bool:
        op = self.program.ops[i]
        return op.rerunnable and not (op.reads_mutated and self.order.is_late(self.cuts[j]))

    def _columns(self) -> None:
        """A column per buffer and op that can matter, found from the last cut to the first."""
        program = self.program
        wanted: set[int] = set()
        columns: list[tuple[dict[int, int], dict[int, int]]] = []
        unit = PERCENT / max(program.seconds, 1e-30)
        for j in range(len(self.cuts) - 1, -1, -1):
            wanted = {b for b in wanted if self._old(j, b)}
            reads = [b for k in (self.cuts[j], *self._span(j)) for b in program.ops[k].inputs if self._old(j, b)]
            open_buffers = list(wanted.union(reads))
            wanted = set(open_buffers)
            keep: dict[int, int] = {}
            rerun: dict[int, int] = {}
            while open_buffers:
                b = open_buffers.pop()
                keep[b] = self.model.column(lower=float(b in program.ops[self.cuts[j]].inputs), integer=True)
                producer = program.buffers[b].producer
                assert producer is not None
                if producer in rerun or not self._may_rerun(j, producer):
                    continue
                rerun[producer] = self.model.column(program.ops[producer].seconds * unit, integer=True)
                fresh = {c for c in program.ops[producer].inputs if self._old(j, c)} - wanted
                wanted |= fresh
                open_buffers.extend(fresh)
            columns.append((keep, rerun))
        self.keep = [keep for keep, _ in reversed(columns)]
        self.rerun = [rerun for _, rerun in reversed(columns)]

    def _row(self, block: str, terms: list[tuple[int, float]], lower: float, upper: float) -> int:
        self.model.sparse_row(block, [column for column, _ in terms], [value for _, value in terms], lower, upper)
        return self.model.rows - 1

    def _bytes_row(self, j: int) -> None:
        """Block 3, in units of the bytes left for choice, so that the solver's tolerance is relative."""
        program, t = self.program, self.cuts[j]
        size = program.buffers
        op = program.ops[t]
        left = self.budget - op.workspace_bytes - sum(size[b].bytes for b in op.outputs)
        if self.order.is_late(t):
            left -= program.late_bytes
        elif self.order.is_early(t):
            left -= sum(size[b].bytes for b in program.mutations if self._before(b, t))
        left -= sum(size[b].bytes for b in program.pinned if self._before(b, t))
        left -= sum(size[b].bytes for b in op.inputs if self._old(j, b))
        if left < 0:
            self.hopeless = True
            return
        unit = max(left, 1)
        terms = [(c, size[b].bytes / unit) for b, c in self.keep[j].items() if not self.model.lower[c]]
        terms += [(c, program.ops[i].state_bytes / unit) for i, c in self.rerun[j].items() if program.ops[i].random]
        terms = [(c, value) for c, value in terms if value > 0]
        self.row[j][-1, -1] = self._row("bytes", terms, -math.inf, left / unit + ROOM)

    def _served(self, j: int, b: int) -> list[tuple[int, float]]:
        producer = self.program.buffers[b].producer
        terms = [(self.keep[j][b], 1.0), *self._brought([j], b)]
        if producer in self.rerun[j]:
            terms.append((self.rerun[j][producer], 1.0))
        return terms

    def _brought(self, spans: Iterable[int], b: int) -> list[tuple[int, float]]:
        """Columns of loads that make ``b`` resident in one of some spans; here there are none."""
        return []

    def _read_rows(self, j: int) -> None:
        """Require that whatever runs in a span finds its inputs there (block 4)."""
        ops = self.program.ops
        for b in {b for k in self._span(j) for b in ops[k].inputs if self._old(j, b)}:
            self.row[j][-1, b] = self._row("reads", self._served(j, b), 1.0, math.inf)
        for i, column in self.rerun[j].items():
            for b in ops[i].inputs:
                if self._old(j, b):
                    terms = [*self._served(j, b), (column, -1.0)]
                    self.row[j][i, b] = self._row("reads", terms, 0.0, math.inf)

    def _carry_rows(self, j: int) -> None:
        """Require that what is kept at the next cut was kept here or made since (block 5)."""
        for b, column in self.keep[j + 1].items():
            if self._old(j, b):
                self._row("carry", [*self._served(j, b), (column, -1.0)], 0.0, math.inf)

    @property
    def may_merge(self) -> bool:
        """Whether merging spans is worth its rows."""
        return 1 < len(self.cuts) <= MERGED_CUTS and self.model.rows <= MERGED_ROWS

    def merge(self) -> None:
        """Add block 6, for all spans that follow each other."""
        for first in range(len(self.cuts) - 1):
            for end in range(first + 2, len(self.cuts) + 1):
                self._merged_rows(first, end)

    def _merged_rows(self, first: int, end: int) -> None:
        """Block 6 for spans ``first`` to ``end - 1``."""
        spans = range(first, end)
        rerun: dict[int, int] = {}  # op -> column: whether it is rerun in any of the spans

        def served(b: int) -> list[tuple[int, float]]:
            producer = self.program.buffers[b].producer
            terms = [(self.keep[first][b], 1.0)] if b in self.keep[first] else []
            terms += self._brought(spans, b)
            if producer is not None and any(producer in self.rerun[j] for j in spans):
                if producer not in rerun:
                    rerun[producer] = self.model.column(integer=True)
                terms.append((rerun[producer], 1.0))
            return terms

        ops = [k for j in spans for k in ([self.cuts[j]] if j > first else []) + list(self._span(j))]
        reads = {b for k in ops for b in self.program.ops[k].inputs if self._old(first, b)}
        for b in reads:
            self._row("merged", served(b), 1.0, math.inf)
        if end < len(self.cuts):
            for b, column in self.keep[end].items():
                if self._old(first, b):
                    self._row("merged", [*served(b), (column, -1.0)], 0.0, math.inf)
        waiting = list(rerun)
        while waiting:
            i = waiting.pop()
            known = len(rerun)
            for b in self.program.ops[i].inputs:
                if self._old(first, b):
                    self._row("merged", [*served(b), (rerun[i], -1.0)], 0.0, math.inf)
            waiting.extend(list(rerun)[known:])
            any_of_them = [(self.rerun[j][i], 1.0) for j in spans if i in self.rerun[j]]
            self._row("merged", [*any_of_them, (rerun[i], -1.0)], 0.0, math.inf)

    @property
    def names(self) -> Names:
        """Names of columns and rows by buffer and op, where there is one cut."""
        return Names(self.keep[0], self.rerun[0], self.row[0])

    @property
    def _weight(self) -> int:
        """The work that one check of the solver stands for."""
        return max(self.model.rows, LEAST_ROWS if len(self.cuts) > 1 else 1)

    def solve(
        self, interrupt: Interrupt, work: int, enough: float, *, whole: bool = True, start: Start | None = None
    ) -> CutSolved:
        """Bound and reruns of the model, within ``work``; a bound above ``enough``, an overhead, is not looked for.

        In whole numbers if ``whole`` and the program is not large, else the linear relaxation, from ``start`` on: the
        error of rounding to whole buffers vanishes at that size.
        """
        if self.hopeless:
            return CutSolved(0.0, True, None)
        if not self.model.cost:
            return CutSolved(0.0, False, [])
        whole = whole and len(self.program.ops) < LARGE_OPS
        weight = self._weight
        # From the slack basis the dual simplex takes less time than presolve alone.
        presolve = {} if whole and self.presolved else {"presolve": "off"}
        solved = solve(
            self.model,
            interrupt,
            relaxed=not whole,
            options={"time_limit": SECONDS, "mip_rel_gap": 1e-5, "mip_abs_gap": self.gap, **presolve},
            most_checks=work // weight,
            enough=enough * PERCENT + self.price,
            basis=start.carried(self.cuts[0], self.names) if start is not None and not whole else None,
            wants_basis=not whole and len(self.cuts) == 1,
        )
        if solved.infeasible:
            return CutSolved(0.0, True, None)
        bound = max(solved.bound - self.price - SAFETY, 0.0) / PERCENT
        reruns = None if solved.values is None else self._realise(solved.values)
        basis = None if solved.basis is None else CutBasis(self.cuts[0], self.names, solved.basis)
        return CutSolved(bound, False, reruns, max(solved.checks, 1) * weight, basis, solved.values)

    def _realise(self, value: NDArray[np.float64]) -> list[tuple[int, int]]:
        """Reruns of a solution, each right before its first use in its span."""
        ops = self.program.ops
        runs: list[tuple[int, int]] = []
        for j in range(len(self.cuts)):
            span = self._span(j)
            first: dict[int, int] = {}
            chosen = {i for i, c in self.rerun[j].items() if value[c] > 0.5}
            for i in sorted(chosen, reverse=True):
                uses = [
                    first.get(r, r) for b in ops[i].outputs for r in self.program.readers[b] if r in first or r in span
                ]
                if uses:
                    first[i] = min(uses)
            runs.extend(first.items())
        return runs
