"""A program solved whole: the relaxation of every span, and what the runs in it take, one after the other.

With few cuts, ``cut_lanes`` says nothing of the bytes of a rerun while it runs, nor of a second run in one span. Where
budgets are tight, both decide: the only rerun that would do may not fit.

Definitions, with those of ``spans``; *the run* of an op in a span is its last rerun there:
1. ``first[j, a, i]``, 0 or 1: both are rerun in span ``j``, the run of ``a`` before that of ``i``. The boundary counts
   as something that runs once in its span and reads nothing.
2. ``there[j, i, b] >= 0``: ``b``, neither read nor made by ``i``, is resident at the run of ``i``.

Rows:
3. *orders*: of two that run, one is the first; ``first`` is transitive.
4. *makers*: what reads ``b`` runs after the maker of ``b``, unless ``b`` was resident when the span began, is loaded in
   it, or its maker runs twice.
5. *there*: what is not loaded in the span is resident at the run of ``i`` if it is wanted after it (kept at the next
   cut, or read by a run that comes later) and was there before (its maker's run comes first, or there is none).
6. *runs*: what is there, what ``i`` reads and makes, its workspace and its states are within the budget.
7. *waits*: what ``i`` reads and is loaded in its span takes no longer than stalls and the runs before ``i``.
8. *gone*: what leaves in the span and is not there at the run of ``i``, nor made again, was written before that.
9. *queues*: the transfers of one lane come one after the other; of copies this is said, and of loads on the lane of
   copies. Steps of more than :data:`HORIZON` are left out, and so are transfers that take as long.

A span's stall is at least what its reads wait for and at least what its transfers take from computing, not the sum.

As ``first`` is about last reruns, what runs or is loaded oftener counts at most twice, and nothing is assumed about
the order of reruns. So all rows are true of every legal schedule of the bound's class that is no longer than the
horizon, but for runs and loads that serve nobody; without these no schedule is longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ebbtide.planners.base import Interrupt
from ebbtide.planners.bounds.cut_basis import Start
from ebbtide.planners.bounds.cut_bound import PERCENT, CutSolved
from ebbtide.planners.hybrid.cut_lanes import Transfer
from ebbtide.planners.hybrid.spans import SpanModel, Terms
from ebbtide.step.machine import Link
from ebbtide.step.program import Program

__all__ = ["WholeModel"]

HORIZON = 1000.0  # percent of the unplanned step
BOUNDARY = -1  # among the ops of a span


@dataclass(frozen=True, slots=True)
class _Queued:
    """A transfer that takes its lane from end to end."""

    end: int  # column
    seconds: float
    chosen: tuple[int, ...]  # columns, of which one is 1 if it takes place


@dataclass(frozen=True, slots=True)
class _Sum:
    """Terms and a constant."""

    terms: tuple[tuple[int, float], ...] = ()
    constant: float = 0.0


class WholeModel(SpanModel):
    """The model of a whole program; arguments as :class:`SpanModel`.

    Args:
        ordered: with definition 1; without, only what stays all through a span is there, and clauses 4, 8 and 9 are
            left out.
    """

    presolved = False  # HiGHS 1.15 then says of some of these models that their optimum is higher than it is

    def __init__(self, program: Program, budget: int, links: Mapping[str, Link], *, ordered: bool = True) -> None:
        super().__init__(program, budget, links, ordered=ordered)
        if self.hopeless:
            return
        if ordered and self.stall and program.seconds:
            self._queue_rows()
        for j in range(len(self.cuts) - 1):
            if not self._span_rows(j):
                self.hopeless = True
                return

    def solve(
        self, interrupt: Interrupt, work: int, enough: float, *, whole: bool = True, start: Start | None = None
    ) -> CutSolved:
        """Solve as :class:`CutModel` does; no bound is above the horizon."""
        most = HORIZON / PERCENT - 1.0
        solved = super().solve(interrupt, work, enough, whole=whole, start=start)
        if "queues" not in self.model.blocks or self.hopeless:
            return solved
        return replace(solved, bound=most if solved.infeasible else min(solved.bound, most), infeasible=False)

    def _runs(self, j: int, i: int) -> _Sum:
        return _Sum((), 1.0) if i == BOUNDARY else _Sum(((self.rerun[j][i], 1.0),))

    def _span_rows(self, j: int) -> bool:
        """Add the rows of one span (clauses 3 to 8); false if nothing fits."""
        program = self.program
        runs = list(self.rerun[j])
        if j + 1 == program.boundary:
            runs.append(BOUNDARY)
        wanted = set(self.keep[j + 1])
        if self.ordered:
            wanted |= {b for i in self.rerun[j] for b in program.ops[i].inputs if b not in program.pinned}
        first = self._order_columns(j, runs) if self.ordered else {}
        if self.ordered:
            self._maker_rows(j, first)
        if self.stall:
            self._wait_rows(j, first)
        known: dict[int, int] = {}  # buffers that stay all through the span, where runs have no order
        fits = True
        leaving = {b for b, _ in self.out[j + 1]} if self.ordered and self.stall else set[int]()
        for i in runs:
            uses = set[int]() if i == BOUNDARY else {*program.ops[i].inputs, *program.made_by_rerun(i)}
            there: dict[int, int] = {}
            for b in sorted((wanted | leaving) - uses):
                if self.ordered:
                    there[b] = self._there(j, i, b, first, runs)
                else:
                    if b not in known:
                        known[b] = self._there(j, i, b, first, runs)
                    there[b] = known[b]
            fits = self._run_row(j, i, there, first) and fits
            if leaving:
                self._gone_rows(j, i, there, first)
        return fits

    def _order_columns(self, j: int, runs: list[int]) -> dict[tuple[int, int], int]:
        """Put the runs of a span in an order (definition 1, clause 3)."""
        first = {(a, i): self.model.column(integer=True) for a in runs for i in runs if a != i}
        for (a, i), column in first.items():
            for each in (a, i):
                if each != BOUNDARY:
                    self._row("orders", [(column, 1.0), (self.rerun[j][each], -1.0)], -math.inf, 0.0)
            if a < i:
                both = [(column, 1.0), (first[i, a], 1.0)]
                self._row("orders", both, -math.inf, 1.0)
                self._at_least("orders", both, [self._runs(j, a), self._runs(j, i), _Sum((), -1.0)])
            for k in runs:
                if k not in (a, i):
                    terms = [(column, 1.0), (first[i, k], 1.0), (first[a, k], -1.0)]
                    self._row("orders", terms, -math.inf, 1.0)
            if i != BOUNDARY and a == BOUNDARY and self.program.ops[i].reads_mutated:
                self._row("orders", [(column, 1.0)], -math.inf, 0.0)
        return first

    def _at_least(self, block: str, terms: Terms, least: list[_Sum]) -> None:
        """``terms`` are at least the sum of ``least``."""
        merged: dict[int, float] = {}
        for column, value in (*terms, *((c, -v) for each in least for c, v in each.terms)):
            merged[column] = merged.get(column, 0.0) + value
        self._row(block, list(merged.items()), sum(each.constant for each in least), math.inf)

    def _maker_rows(self, j: int, first: Mapping[tuple[int, int], int]) -> None:
        """Run what makes a buffer before what reads it (clause 4)."""
        program = self.program
        for i in self.rerun[j]:
            for b in program.ops[i].inputs:
                maker = program.buffers[b].producer
                if not self._old(j, b) or maker not in self.rerun[j]:
                    continue
                terms = [(first[maker, i], 1.0), (self.keep[j][b], 1.0), (self.twice[j][maker], 1.0)]
                self._at_least("makers", [*terms, *self._loads(j, b)], [self._runs(j, i)])
        for i, column in self.twice[j].items():
            self._row("makers", [(column, 1.0), (self.rerun[j][i], -1.0)], -math.inf, 0.0)

    def _gone_rows(self, j: int, i: int, there: Mapping[int, int], first: Mapping[tuple[int, int], int]) -> None:
        """Require that what is gone at a run was written before it (clause 8)."""
        program, unit = self.program, self._unit
        for (b, tier), column in self.out[j + 1].items():
            maker = program.buffers[b].producer
            assert maker is not None
            if b not in there or maker == i:
                continue
            self.model.integer.add(there[b])
            away = self._away(column, j + 1, b, tier)
            free = sum(program.ops[k].seconds for k in range(maker + 1, j + 1)) * unit
            terms = [(column, away.seconds), (there[b], -away.seconds)]
            terms += [] if i == BOUNDARY else [(self.rerun[j][i], away.seconds)]
            terms += [(self.rerun[j][maker], -away.seconds)] if maker in self.rerun[j] else []
            terms += [(lost, -1.0) for lost in self._lost[maker + 1 : j + 1]] + [(self.stall[j + 1], -1.0)]
            terms += [(first[k, i], -program.ops[k].seconds * unit) for k in self.rerun[j] if k != i]
            terms += [(c, -program.ops[k].seconds * unit) for k, c in self.twice[j].items()]
            self._row("gone", terms, -math.inf, free + (0.0 if i == BOUNDARY else away.seconds))

    def _queue_rows(self) -> None:
        """Let the transfers of a lane come one after the other (clause 9)."""
        copies: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for j, columns in enumerate(self.out):
            for key, column in columns.items():
                copies.setdefault(key, []).append((j, column))
        queues: dict[str, list[_Queued]] = {}
        for (b, tier), when in copies.items():
            away = self._away(when[0][1], when[0][0], b, tier)
            if away.seconds > HORIZON:
                self._never(column for _, column in when)
                continue
            queues.setdefault(self.links[tier].lane("out"), []).append(self._queued(away, when))
        for lane, queue in queues.items():
            back = [
                self._back(column, j, b, tier)
                for j, columns in enumerate(self.into)
                for (b, tier), column in columns.items()
                if self.links[tier].lane("in") == lane
            ]
            for index, one in enumerate(queue):
                for other in queue[:index]:
                    self._one_by_one(one, other)
            for each in back:
                if each.seconds > HORIZON:
                    self._never([each.column])
                    continue
                one = self._queued(each, [(each.before, each.column)])
                for other in queue:
                    self._one_by_one(one, other)

    def _never(self, columns: Iterable[int]) -> None:
        """Leave out transfers that take longer than :data:`HORIZON`."""
        for column in columns:
            self.model.upper[column] = 0.0

    def _queued(self, each: Transfer, when: list[tuple[int, int]]) -> _Queued:
        """A transfer that is over at each cut of ``when`` if the column beside it is 1."""
        base = self._base
        end, chosen = self.model.column(upper=HORIZON), [column for _, column in when]
        begin = [(end, 1.0), *((lost, -1.0) for lost in self._lost[: each.after + 1]), *((c, -HORIZON) for c in chosen)]
        self._row("queues", begin, base[each.after + 1] + each.seconds - HORIZON, math.inf)
        for cut, column in when:
            over = [(end, 1.0), *((lost, -1.0) for lost in self._lost[: cut + 1]), (column, HORIZON)]
            self._row("queues", over, -math.inf, base[cut] + HORIZON)
        return _Queued(end, each.seconds, tuple(chosen))

    def _one_by_one(self, one: _Queued, other: _Queued) -> None:
        order = self.model.column(integer=True)
        both = [(column, -HORIZON) for column in (*one.chosen, *other.chosen)]
        terms = [(one.end, 1.0), (other.end, -1.0), (order, HORIZON), *both]
        self._row("queues", terms, one.seconds - 2 * HORIZON, math.inf)
        terms = [(other.end, 1.0), (one.end, -1.0), (order, -HORIZON), *both]
        self._row("queues", terms, other.seconds - 3 * HORIZON, math.inf)

    def _wait_rows(self, j: int, first: Mapping[tuple[int, int], int]) -> None:
        """Let runs wait for what they read and is loaded in their span (clause 7)."""
        program, unit = self.program, self._unit
        for i in self.rerun[j]:
            waits: dict[str, list[tuple[int, float]]] = {}
            for (b, tier), column in self.into[j].items():
                if b in program.ops[i].inputs:
                    link = self.links[tier]
                    seconds = link.seconds(program.buffers[b].bytes, "in") * unit
                    waits.setdefault(link.lane("in"), []).append((column, seconds))
            others = [(k, c) for k, c in self.rerun[j].items() if k != i]
            time = [(first.get((k, i), c), program.ops[k].seconds * unit) for k, c in others]
            time += [(c, program.ops[k].seconds * unit) for k, c in self.twice[j].items()]
            for terms in waits.values():
                total = sum(seconds for _, seconds in terms)
                lost = [(self.stall[j + 1], -1.0), *((c, -seconds) for c, seconds in time if seconds)]
                self._row("waits", [*terms, (self.rerun[j][i], total), *lost], -math.inf, total)

    def _there(self, j: int, i: int, b: int, first: Mapping[tuple[int, int], int], runs: list[int]) -> int:
        """Add the column of a buffer that is resident at a run, and its rows (definition 2, clause 5)."""
        program, column = self.program, self.model.column()
        maker = program.buffers[b].producer
        wanted = [_Sum(((self.keep[j + 1][b], 1.0),))] if b in self.keep[j + 1] else []
        if self.ordered:
            wanted += [
                _Sum(((first[i, k], 1.0),)) for k in runs if k not in (i, BOUNDARY) and b in program.ops[k].inputs
            ]
        made = [(self.rerun[j][maker], 1.0)] if maker in self.rerun[j] else []
        loads = self._loads(j, b)
        for each in wanted:
            self._at_least("there", [(column, 1.0), *loads, *made], [each])
            if self.ordered and made and maker is not None and maker != i:
                before = _Sum(((first[maker, i], 1.0),), -1.0)
                self._at_least("there", [(column, 1.0), *loads], [each, before])
        return column

    def _run_row(self, j: int, i: int, there: Mapping[int, int], first: Mapping[tuple[int, int], int]) -> bool:
        """Keep what is resident at a run within the budget (clause 6)."""
        program, size = self.program, self.program.buffers
        left = self._left(j)
        terms = [(column, float(size[b].bytes)) for b, column in there.items()]
        terms += list(self._states_at(j, i, first))
        gone = sum(size[b].bytes for b in program.mutations)
        if i == BOUNDARY:
            return self._within("runs", terms, left - program.late_bytes - program.between_excess_bytes)
        op = program.ops[i]
        bytes_ = op.workspace_bytes + sum(size[b].bytes for b in program.made_by_rerun(i))
        bytes_ += sum(size[b].bytes for b in op.inputs if b not in program.pinned)
        terms.append((self.rerun[j][i], float(bytes_)))
        if j + 1 == program.boundary and self.ordered:
            terms.append((first[BOUNDARY, i], float(program.late_bytes)))
            terms.append((first[i, BOUNDARY], float(gone)))
        return self._within("runs", terms, left)

    def _states_at(self, j: int, i: int, first: Mapping[tuple[int, int], int]) -> Iterator[tuple[int, float]]:
        """Generator states at the run of ``i``: those of later spans and of later runs of this one, its own twice."""
        following = self.state[j + 1] if j + 1 < len(self.cuts) else {}
        ops = self.program.ops
        for o in {*following, *(k for k in self.rerun[j] if ops[k].random)} - {i}:
            wanted = [c for c in (following.get(o), first.get((i, o))) if c is not None]
            if o > j or not wanted:
                continue
            column = wanted[0]
            if len(wanted) > 1:
                column = self.model.column()
                for each in wanted:
                    self._row("states", [(column, 1.0), (each, -1.0)], 0.0, math.inf)
            yield column, float(ops[o].state_bytes)
        if i != BOUNDARY and ops[i].random:
            yield self.rerun[j][i], 2.0 * ops[i].state_bytes
