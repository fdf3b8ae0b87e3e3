"""The cut relaxation with lanes of a small program, cut at every op: its columns, its bytes and its transfers.

Every op is a cut, so that *span* ``j`` lies between the beginnings of the first runs of ops ``j`` and ``j + 1``.
Definitions, with those of ``cut_lanes``:
1. ``rerun[j, i]`` is there for op ``j`` itself as well.
2. ``again[j, b, tier]``, 0 or 1: a reload of ``b`` is issued in span ``j`` for which no ``in[j, b, tier]`` stands. It
   needs a copy that is there when op ``j + 1`` begins, and lies in time where ``in`` does.
3. ``twice[j, i]``, 0 or 1: op ``i`` is rerun at least twice in span ``j``; it costs the op's time once more.
4. ``state[j, i]``: the generator state of random op ``i`` is kept while op ``j`` runs, as a rerun is to come.

Rows besides those of ``cut_lanes``:
5. *states*: what is kept at a cut and generator states are within the budget.
6. *arrivals*: a load has arrived when its span ends, unless its buffer is kept there, and if a rerun of the span reads
   it. A copy is issued in the span before the cut at which it is there, unless its buffer was kept at the cut before.
   A copy and the load of it in one span (``again``) lie one after the other.
7. *shares*: in each span stalls are at least what the transfers issued in it take from computing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from ebbtide.planners.bounds.cut_bound import PERCENT
from ebbtide.planners.hybrid.cut_lanes import LaneModel, Transfer
from ebbtide.planners.hybrid.rounding import Load
from ebbtide.planners.search.orders import CapturedOrder
from ebbtide.planners.solvers.highs import ROOM
from ebbtide.step.machine import Link
from ebbtide.step.program import Program

__all__ = ["SpanModel", "Terms"]

Terms = list[tuple[int, float]]


class SpanModel(LaneModel):
    """Columns and rows of the module; arguments as :class:`LaneModel`.

    Args:
        ordered: whether there are columns of definition 3.
    """

    def __init__(self, program: Program, budget: int, links: Mapping[str, Link], *, ordered: bool) -> None:
        self.ordered = ordered
        self.again: list[dict[tuple[int, str], int]] = []  # per span: buffer and tier -> column
        self.twice: list[dict[int, int]] = []  # per span: op -> column
        self.state: list[dict[int, int]] = [{} for _ in program.ops]  # per cut: op -> column
        self._fresh: dict[int, int] = {}  # per column of ``out`` that has two parts, the one issued in its span
        self._unit = PERCENT / max(program.seconds, 1e-30)
        self._base = np.concatenate([[0.0], np.cumsum([op.seconds * self._unit for op in program.ops])])
        super().__init__(program, budget, list(range(len(program.ops))), CapturedOrder(program), links)
        if not self.hopeless:
            self._again_rows()
            self._state_columns()

    def loads(self, values: NDArray[np.float64]) -> list[Load]:
        """Loads of a solution, those that come again included."""
        again = [
            Load(j, b, t) for j, columns in enumerate(self.again) for (b, t), c in columns.items() if values[c] > 0.5
        ]
        return [*super().loads(values), *again]

    # -- columns ---------------------------------------------------------------------------------------------

    def _columns(self) -> None:
        super()._columns()
        program, unit = self.program, self._unit
        if not self.stall and len(self.cuts) > 1 and any(self._tiers(b) for columns in self.keep for b in columns):
            self._stall_columns()
        self.model.integer.update(column for columns in self.into for column in columns.values())
        for j in range(len(self.cuts) - 1):
            made = [b for b in program.ops[j].outputs if b in self.keep[j + 1]]
            if made and self._may_rerun(j, j):
                self.rerun[j][j] = self.model.column(program.ops[j].seconds * unit, integer=True)
        for j in range(len(self.cuts)):
            self.again.append({})
            self.twice.append({})
            if j + 1 == len(self.cuts):
                continue
            if self.ordered:
                for i in self.rerun[j]:
                    self.twice[j][i] = self.model.column(program.ops[i].seconds * unit, integer=True)
            wanted = set(self.keep[j + 1]).union(b for i in self.rerun[j] for b in program.ops[i].inputs)
            for b in sorted(wanted):
                for tier in self._tiers(b) if self.stall else ():
                    self.again[j][b, tier] = self.model.column(integer=True)
                    if (b, tier) not in self.out[j + 1]:
                        self.out[j + 1][b, tier] = self.model.column(integer=True)

    def _more_runs(self, j: int) -> Iterable[tuple[int, int]]:
        return self.twice[j].items()

    def _state_columns(self) -> None:
        """Keep generator states for reruns to come, within the budget (definition 4, clause 5)."""
        program = self.program
        for j in range(len(self.cuts) - 1, -1, -1):
            following = self.state[j + 1] if j + 1 < len(self.cuts) else {}
            for i in {i for i in self.rerun[j] if program.ops[i].random} | {i for i in following if i <= j}:
                column = self.state[j][i] = self.model.column()
                for sooner in (self.rerun[j].get(i), following.get(i)):
                    if sooner is not None:
                        self._row("states", [(column, 1.0), (sooner, -1.0)], 0.0, math.inf)
            held = [(c, float(program.ops[i].state_bytes)) for i, c in self.state[j].items()]
            if held and not self._fits(j, held):
                self.hopeless = True

    def _fits(self, j: int, held: Terms) -> bool:
        program, op = self.program, self.program.ops[j]
        left = self._left(j, before=True) - op.workspace_bytes - sum(program.buffers[b].bytes for b in op.outputs)
        held += [(c, float(program.buffers[b].bytes)) for b, c in self.keep[j].items()]
        return self._within("states", held, left)

    def _within(self, block: str, terms: Terms, budget_left: float) -> bool:
        """A row of bytes; false if nothing can be within it."""
        if budget_left < 0:
            return False
        unit = max(budget_left, 1.0)
        merged: dict[int, float] = {}
        for column, value in terms:
            merged[column] = merged.get(column, 0.0) + value / unit
        self._row(block, [each for each in merged.items() if each[1]], -math.inf, budget_left / unit + ROOM)
        return True

    def _left(self, j: int, *, before: bool = False) -> float:
        """Bytes that pinned buffers leave while op ``j`` runs (``before``), or all through its span."""
        program, size = self.program, self.program.buffers
        made = [b for b, each in enumerate(size) if each.producer is not None and each.producer < j + (not before)]
        left = self.budget - sum(size[b].bytes for b in made if b in program.pinned)
        if j >= program.boundary:
            return left - program.late_bytes
        if before or j + 1 < program.boundary:
            left -= sum(size[b].bytes for b in made if b in program.mutations)
        return left

    # -- rows ------------------------------------------------------------------------------------------------

    def _again_rows(self) -> None:
        """Require a copy for every load that comes again (definition 2)."""
        for j, columns in enumerate(self.again):
            for key, column in columns.items():
                copies = [(self.out[i][key], 1.0) for i in range(j + 2) if i < len(self.out) and key in self.out[i]]
                self._row("copies", [*copies, (column, -1.0)], 0.0, math.inf)

    def _transfers(self) -> dict[str, list[Transfer]]:
        """List the transfers of each lane, by when they arrive (clause 6)."""
        found: dict[str, list[Transfer]] = {}
        for j, columns in enumerate(self.out):
            for (b, tier), column in columns.items():
                found.setdefault(self.links[tier].lane("out"), []).extend(self._leaving(column, j, b, tier))
        for j, columns in enumerate(self.into):
            for (b, tier), column in columns.items():
                readers = [self.rerun[j][i] for i in self.rerun[j] if b in self.program.ops[i].inputs]
                lane = found.setdefault(self.links[tier].lane("in"), [])
                lane.extend(self._split(self._back(column, j, b, tier), j, b, readers))
            for (b, tier), column in self.again[j].items():
                lane = found.setdefault(self.links[tier].lane("in"), [])
                back = self._back(column, j, b, tier)
                lane.extend(self._split(back, j, b, []))
        return found

    def _split(self, back: Transfer, j: int, b: int, readers: Iterable[int]) -> Iterator[Transfer]:
        """A load as two transfers: one that is over when its span is, and one that is not."""
        if back.before <= j + 1:
            yield back
            return
        soon, later = self.model.column(), self.model.column()
        self._row("arrivals", [(back.column, 1.0), (soon, -1.0), (later, -1.0)], 0.0, 0.0)
        kept = self.keep[j + 1].get(b) if j + 1 < len(self.cuts) else None
        self._row("arrivals", [(later, 1.0), *([(kept, -1.0)] if kept is not None else [])], -math.inf, 0.0)
        for each in readers:
            self._row("arrivals", [(later, 1.0), (each, 1.0)], -math.inf, 1.0)
        yield Transfer(soon, back.seconds, back.after, j + 1)
        yield Transfer(later, back.seconds, back.after, back.before)

    def _share_rows(self) -> None:
        """Add to the stalls of each span what its transfers take from computing (clause 7)."""
        super()._share_rows()
        size, taken = self.program.buffers, dict[int, dict[int, float]]()
        for j in range(len(self.cuts)):
            columns = [(key, column, "in", j) for key, column in (*self.into[j].items(), *self.again[j].items())]
            columns += [(key, self._fresh.get(column, column), "out", j - 1) for key, column in self.out[j].items()]
            for (b, tier), column, way, span in columns:
                link = self.links[tier]
                seconds = link.seconds(size[b].bytes, "out" if way == "out" else "in")
                taken.setdefault(span, {})[column] = -link.compute_share * seconds * self._unit
        for span, terms in taken.items():
            if any(terms.values()):
                self._row("shares", [*terms.items(), (self.stall[span + 1], 1.0)], 0.0, math.inf)

    def _leaving(self, column: int, j: int, b: int, tier: str) -> Iterator[Transfer]:
        """A copy as two transfers: one that begins in the span before the cut, and one of what was kept before."""
        out, producer = self._away(column, j, b, tier), self.program.buffers[b].producer
        if producer == j - 1:
            yield out
            return
        fresh, kept = self.model.column(), self.model.column()
        self._fresh[column] = fresh
        self._row("arrivals", [(column, 1.0), (fresh, -1.0), (kept, -1.0)], 0.0, 0.0)
        self._row("arrivals", [(kept, 1.0), (self.keep[j - 1][b], -1.0)], -math.inf, 0.0)
        yield Transfer(kept, out.seconds, out.after, out.before)
        yield Transfer(fresh, out.seconds, j - 1, out.before)

    def _lane_rows(self) -> None:
        super()._lane_rows()
        base = self._base
        for j, columns in enumerate(self.again):
            for (b, tier), column in columns.items():
                back, producer = self._back(column, j, b, tier), self.program.buffers[b].producer
                assert producer is not None
                seconds = self.links[tier].seconds(self.program.buffers[b].bytes, "out") * self._unit + back.seconds
                free = float(base[back.before] - base[producer + 1])
                if seconds > free:
                    self._window(producer, back.before, np.array([column]), np.array([seconds]), free)
                if producer < j:
                    known = [self.out[i][b, tier] for i in range(j + 1) if (b, tier) in self.out[i]]
                    taking = np.full(2 + len(known), -seconds)
                    taking[0] = seconds
                    free = float(base[back.before] - base[j + 1])
                    self._window(j, back.before, np.array([column, self.keep[j][b], *known]), taking, free)

    def _loads(self, j: int, b: int) -> Terms:
        """Reloads of ``b`` in span ``j``."""
        columns = (*self.into[j].items(), *self.again[j].items())
        return [(column, 1.0) for (c, _), column in columns if c == b]
