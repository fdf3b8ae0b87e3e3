"""The cut relaxation with lanes: a proven lower bound on the overhead of plans that may recompute and move buffers.

The bound is of makespans as ``step.simulate`` counts them, and assumes what ``base.PROGRAM_ORDER`` does but for the
tiers: first runs in captured order, the boundary where it was captured, the seconds of ops and links as given. Of
moves it assumes clause 4 and 7 of ``step.legality``: one offload per buffer and step, the first free after it waits
for the copy, what comes back is read before it goes. Bytes that a move itself takes on the device are not counted.

Definitions, with those of ``bounds.cut_bound`` (cuts ``t_1 < .. < t_m``; ``keep`` and ``rerun``, 0 or 1):
1. *Span* 0 lasts from the step's start to the beginning of the first run of ``t_1``; span ``j`` from the beginning of
   that of ``t_j`` to that of ``t_(j+1)``, the last one until the compute lane is done.
2. ``out[j, b, tier]``, 0 or 1: the copy of ``b`` in ``tier`` is there when ``t_j`` begins, and was not when
   ``t_(j-1)`` began.
3. ``in[j, b, tier]``, 0 or 1: ``b``, made before ``t_j``, is not resident while ``t_j`` runs, its op is not rerun in
   span ``j``, and a reload of it is issued there; the first one is meant.
4. ``stall[j] >= 0``: what span ``j`` lasts on the compute lane beyond its first runs and the reruns that ``rerun[j]``
   counts: waits, what transfers take from computing, further reruns.

Reruns and stalls are the cost. Rows besides those of ``cut_bound``, where ``in`` may serve a read or a carry too:
5. *copies*: ``in[j, b, tier]`` is at most the sum of ``out[i, b, tier]`` over ``i <= j``: what is not resident and
   comes back by a load was freed, and that free waited for the copy. All ``out`` of a buffer sum up to at most 1.
6. *sources*: ``out[j, b]`` needs ``b`` kept at ``t_(j-1)``, where its copy is under way there, or rerun since.
7. *lanes*: transfers of one lane that lie between the end of the first run of op ``p`` and the beginning of that of op
   ``k`` take no longer than what lies between: first runs, and reruns and stalls of the spans that this touches. An
   ``out[j, b]`` lies after the op that makes ``b`` and before ``t_j``. An ``in[j, b]`` lies after ``t_j`` and before
   the first captured reader of ``b`` after it, wherever in the program: what is loaded is not freed unread. Nothing
   else ends it: a load may be under way at the next cut, where it counts as kept. Links that are not duplex have one
   lane.
8. *shares*: up to each cut, stalls are at least what the transfers issued before it take from computing.
9. *capacities*: all copies in a tier are within it.

All are true of every legal schedule, so the least cost is a bound; leaving out windows of clause 7 in large programs
lowers it at most. Tiers have columns of their own, so nothing is assumed about how they are used together.

Of all optima one that moves few bytes is sought, by a price of :data:`PRICE` percent of the step for all moves
together, which is taken off the bound again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ebbtide.planners.base import LARGE_OPS
from ebbtide.planners.bounds.cut_bound import PERCENT, CutModel
from ebbtide.planners.hybrid.floor import tiers_of
from ebbtide.planners.hybrid.rounding import Load
from ebbtide.planners.search.orders import CapturedOrder
from ebbtide.planners.solvers.highs import ROOM
from ebbtide.step.machine import Link
from ebbtide.step.program import Program

__all__ = ["GAP", "PRICE", "LaneModel", "Transfer"]

PRICE = 1e-3  # of moving everything, in percent of the unplanned step
GAP = 0.01  # percent of the unplanned step: with less, small objectives take branch and bound minutes
ENTRIES = 4  # of a row of :class:`CutModel`, about
WINDOWS = 64  # of clause 7 per lane and cut, in large programs


@dataclass(frozen=True, slots=True)
class Transfer:
    """A column whose transfer lies after the first run of ``after`` and before that of ``before`` (clause 7)."""

    column: int
    seconds: float  # in percent of the unplanned step
    after: int
    before: int


class LaneModel(CutModel):
    """The relaxation with lanes, a method per block of rows; arguments as :class:`CutModel`, and links."""

    def __init__(
        self, program: Program, budget: int, cuts: list[int], order: CapturedOrder, links: Mapping[str, Link]
    ) -> None:
        self.links = dict(links)
        self.into: list[dict[tuple[int, str], int]] = [{} for _ in cuts]  # per cut: buffer and tier -> column
        self.out: list[dict[tuple[int, str], int]] = [{} for _ in cuts]
        self.stall: list[int] = []  # per span
        self._unit = PERCENT / max(program.seconds, 1e-30)
        super().__init__(program, budget, cuts, order)
        if self.hopeless or not self.stall:
            return
        self.gap, self.price = GAP, PRICE
        self._copy_rows()
        self._source_rows()
        self._capacity_rows()
        if program.seconds:
            self._lane_rows()
            self._share_rows()

    def loads(self, values: NDArray[np.float64]) -> list[Load]:
        """Loads of a solution, by the cut after which they come."""
        found: list[Load] = []
        for j, columns in enumerate(self.into):
            best: dict[int, tuple[float, str]] = {}
            for (b, tier), column in columns.items():
                best[b] = max(best.get(b, (0.0, "")), (float(values[column]), tier))
            served = {b: sum(float(values[columns[b, t]]) for t in self._tiers(b)) for b in best}
            found.extend(Load(j, b, tier) for b, (_, tier) in best.items() if served[b] > 0.5)
        return found

    @property
    def _weight(self) -> int:
        """The work that one check of the solver stands for: windows make long rows."""
        return max(super()._weight, self.model.entries // ENTRIES)

    # -- columns ---------------------------------------------------------------------------------------------

    def _tiers(self, b: int) -> tuple[str, ...]:
        return tiers_of(self.program, b, self.links)

    def _columns(self) -> None:
        """Where there is one cut, ``out`` and ``in`` are one column: a copy that is not loaded serves nobody."""
        super()._columns()
        program = self.program
        moved = [
            (j, b, tier)
            for j, keep in enumerate(self.keep)
            for b in keep
            if b not in program.ops[self.cuts[j]].inputs
            for tier in self._tiers(b)
        ]
        total = sum(program.buffers[b].bytes for _, b, _ in moved) or 1
        for j, b, tier in moved:
            self.into[j][b, tier] = self.model.column(PRICE * program.buffers[b].bytes / total)
        if len(self.cuts) == 1:
            self.out = self.into
        else:
            for j, b, tier in moved:
                for i in range(j + 1):
                    if self._old(i, b) and (b, tier) not in self.out[i]:
                        self.out[i][b, tier] = self.model.column(integer=True)
        if moved:
            self._stall_columns()

    def _stall_columns(self) -> None:
        self.stall = [self.model.column(1.0, upper=math.inf) for _ in range(len(self.cuts) + 1)]
        self._lost = [self.model.column(upper=math.inf) for _ in range(len(self.cuts) + 1)]

    def _brought(self, spans: Iterable[int], b: int) -> list[tuple[int, float]]:
        return [(self.into[j][b, tier], 1.0) for j in spans for tier in self._tiers(b) if (b, tier) in self.into[j]]

    # -- rows ------------------------------------------------------------------------------------------------

    def _copy_rows(self) -> None:
        """Require a copy for every load, and one at most for each buffer (clause 5)."""
        if self.out is not self.into:
            for j, columns in enumerate(self.into):
                for key, column in columns.items():
                    copies = [(self.out[i][key], 1.0) for i in range(j + 1) if key in self.out[i]]
                    self._row("copies", [*copies, (column, -1.0)], 0.0, math.inf)
        once: dict[int, list[tuple[int, float]]] = {}
        for columns in self.out:
            for (b, _), column in columns.items():
                once.setdefault(b, []).append((column, 1.0))
        for terms in once.values():
            if len(terms) > 1:
                self._row("copies", terms, -math.inf, 1.0)

    def _source_rows(self) -> None:
        """Require that what leaves after a cut was there (clause 6)."""
        for j in range(1, len(self.cuts)):
            ending: dict[int, list[tuple[int, float]]] = {}
            for (b, _), column in self.out[j].items():
                if self._old(j - 1, b):
                    ending.setdefault(b, []).append((column, -1.0))
            for b, terms in ending.items():
                producer = self.program.buffers[b].producer
                there = [(self.keep[j - 1][b], 1.0)]
                there += [(self.rerun[j - 1][producer], 1.0)] if producer in self.rerun[j - 1] else []
                self._row("sources", [*there, *terms], 0.0, math.inf)

    def _capacity_rows(self) -> None:
        """Keep copies within the capacity of their tier, in units of it (clause 9)."""
        for tier, link in self.links.items():
            unit = max(link.capacity_bytes, 1)
            sizes = [
                (column, link.round_up(self.program.buffers[b].bytes) / unit)
                for columns in self.out
                for (b, to), column in columns.items()
                if to == tier
            ]
            if sum(size for _, size in sizes) > 1.0:
                self._row("capacities", sizes, -math.inf, 1.0 + ROOM)

    def _transfers(self) -> dict[str, list[Transfer]]:
        """List the transfers of each lane."""
        found: dict[str, list[Transfer]] = {}
        for j in range(len(self.cuts)):
            for (b, tier), column in self.out[j].items():
                found.setdefault(self.links[tier].lane("out"), []).append(self._away(column, j, b, tier))
            for (b, tier), column in self.into[j].items():
                found.setdefault(self.links[tier].lane("in"), []).append(self._back(column, j, b, tier))
        return found

    def _away(self, column: int, j: int, b: int, tier: str) -> Transfer:
        """A copy that is there at cut ``j``."""
        producer = self.program.buffers[b].producer
        assert producer is not None
        seconds = self.links[tier].seconds(self.program.buffers[b].bytes, "out") * self._unit
        return Transfer(column, seconds, producer, self.cuts[j])

    def _back(self, column: int, j: int, b: int, tier: str) -> Transfer:
        """A load that is issued in span ``j``: the boundary waits for it, if the whole span lies before."""
        program, cut = self.program, self.cuts[j]
        need = next((k for k in program.readers[b] if k > cut), len(program.ops))
        if j + 1 < len(self.cuts) and self.cuts[j + 1] < program.boundary:
            need = min(need, program.boundary)
        return Transfer(column, self.links[tier].seconds(program.buffers[b].bytes, "in") * self._unit, cut, need)

    def _lane_rows(self) -> None:
        """Give transfers of a lane the time of the window in which they lie (clause 7)."""
        base = np.concatenate([[0.0], np.cumsum([op.seconds * self._unit for op in self.program.ops])])
        for j, lost in enumerate(self._lost):
            reruns = self.rerun[j - 1].items() if j else ()
            terms = [(c, self.program.ops[i].seconds * self._unit) for i, c in reruns]
            terms += [(c, self.program.ops[i].seconds * self._unit) for i, c in self._more_runs(j - 1)] if j else []
            self._row("lanes", [*terms, (self.stall[j], 1.0), (lost, -1.0)], 0.0, math.inf)
        for transfers in self._transfers().values():
            after, before = (np.array([getattr(t, end) for t in transfers]) for end in ("after", "before"))
            seconds, columns = np.array([t.seconds for t in transfers]), np.array([t.column for t in transfers])
            windows = {(p, k) for k in self.cuts for p in self._some(after[before <= k].tolist())}
            windows |= {(p, k) for p in self.cuts for k in self._some(before[after >= p].tolist())}
            for p, k in sorted(windows):
                inside = np.flatnonzero((after >= p) & (before <= k) & (seconds > 0.0))
                free = float(base[k] - base[p + 1])
                if len(inside) and seconds[inside].sum() > free:
                    self._window(p, k, columns[inside], seconds[inside], free)

    def _more_runs(self, j: int) -> Iterable[tuple[int, int]]:
        """Ops that are known to run once more in span ``j``, with the columns that say so."""
        return ()

    def _some(self, ends: list[int]) -> Sequence[int]:
        """Distinct ends of windows, not too many in large programs."""
        distinct = sorted(set(ends))
        if len(self.program.ops) < LARGE_OPS or len(distinct) <= WINDOWS:
            return distinct
        return [distinct[i * (len(distinct) - 1) // (WINDOWS - 1)] for i in range(WINDOWS)]

    def _window(self, p: int, k: int, columns: NDArray[np.int64], seconds: NDArray[np.float64], free: float) -> None:
        first, last = (sum(c <= p for c in self.cuts), sum(c < k for c in self.cuts))
        lost = self._lost[first : last + 1]
        terms: dict[int, float] = {}
        for column, value in zip(columns.tolist(), seconds.tolist(), strict=True):
            terms[column] = terms.get(column, 0.0) + value
        self._row("lanes", [*terms.items(), *((column, -1.0) for column in lost)], -math.inf, free)

    def _share_rows(self) -> None:
        """Add to stalls what transfers take from computing (clause 8)."""
        if not any(link.compute_share for link in self.links.values()):
            return
        terms: dict[int, float] = {}

        def take(columns: Mapping[tuple[int, str], int], way: str) -> None:
            for (b, tier), column in columns.items():
                link = self.links[tier]
                seconds = link.seconds(self.program.buffers[b].bytes, "out" if way == "out" else "in")
                terms[column] = terms.get(column, 0.0) - link.compute_share * seconds * self._unit

        for j in range(len(self.cuts) + 1):
            if j:
                take(self.into[j - 1], "in")
            if j < len(self.cuts):
                take(self.out[j], "out")
            self._row("shares", [*terms.items(), *((column, 1.0) for column in self.stall[: j + 1])], 0.0, math.inf)
