"""The stage model of Checkmate (Jain et al., MLSys 2020, §4) over buffers, in two forms that have the same optimum.

Stage ``t`` ends with the first run of op ``t``; before it every earlier op may run again, once, in ascending order
(the paper's frontier-advancing partition, §4.6). Columns, all in [0, 1]; ``run`` alone has to be integral, the least
values of the others then are:

- ``run[t, i]``: op ``i < t`` runs again in stage ``t``. Op ``t`` itself runs in its stage: no column.
- ``held[t, b]``: buffer ``b``, made before stage ``t``, is resident when it begins (the paper's S).
- ``state[t, i]``: the generator state of random op ``i`` is kept into stage ``t``: it runs again there or later.

Pinned buffers, tangents and mutations are constants of every stage. Blocks of rows that both forms have:

- *reads*: who runs finds every input held or made before it in the stage.
- *holds*: what is held into the next stage was held into this one or made in it.
- *states*: a state is kept up to the last repeat.
- *bytes*: at each slot of a stage, what is resident, and if its op runs its workspace and all its outputs.
- *between*: what is held at the boundary leaves room for user code.

The *free* form is the paper's: ``free[t, b, k]``, ``b`` leaves right after ``k``, its producer or a reader, ran in
stage ``t``, and one column of bytes per slot that is carried along. As FREE only makes room, upper bounds suffice
(``free <= run of k``, ``<= 1 - held[t+1, b]``, ``<= 1 - run of each later reader``) and it need not be integral. Where
an op runs again although one of its outputs is held, the second copy leaves at once (column ``spare``).

The *gap* form has no FREE: ``there[t, b, j]`` says that ``b`` is resident between its ``j``-th event of the stage (its
producer's slot, then its readers') and the next. It does not grow within a stage, and its relaxation is tighter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ebbtide.planners.base import Interrupt
from ebbtide.planners.search.reruns_from_kept import last_rerun_stage
from ebbtide.planners.solvers.highs import Model
from ebbtide.step.program import Program

__all__ = ["PERCENT", "StageModel"]

PERCENT = 100.0  # objective in percent of the unplanned step: HiGHS' tolerances are absolute
MOST_COLUMNS = 4_000_000  # some GB; no solver here has ended on a tenth of it
SLACK = 1e-9  # of the bytes left for choice: rounding when sizes become fractions


class StageModel:
    """The model of one program and budget.

    Args:
        program: with costs.
        budget: bytes above the step's start.
        form: ``"gap"`` or ``"free"``.
        interrupt: ends the building, which takes a while from some hundred ops on.

    Attributes:
        model: columns and rows.
        run: column by (stage, op).
        held: column by (stage, buffer).
        hopeless: whether some stage cannot fit whatever is kept, so that no model was built.
        unfinished: why the model is not whole: the interrupt came first, or it has more than :data:`MOST_COLUMNS`;
            empty if it is.
    """

    def __init__(self, program: Program, budget: int, form: str = "gap", *, interrupt: Interrupt | None = None) -> None:
        self.program = program
        self.budget = budget
        self.model = Model()
        self.run: dict[tuple[int, int], int] = {}
        self.held: dict[tuple[int, int], int] = {}
        self.state: dict[tuple[int, int], int] = {}
        self.there: dict[tuple[int, int], list[int]] = {}
        self.free: dict[tuple[int, int, int], int] = {}
        self.spare: dict[tuple[int, int], int] = {}
        self._resident = [self._pinned_bytes(t) for t in range(len(program.ops) + 1)]
        self._chosen = [
            b
            for b, buffer in enumerate(program.buffers)
            if buffer.producer is not None and b not in program.pinned and program.readers[b]
        ]
        self.unfinished = ""
        self.hopeless = self._is_hopeless()
        if self.hopeless:
            return
        self._columns()
        if self.unfinished:
            return
        self._state_rows()
        for t in range(len(program.ops)):
            # Not truth alone: an interrupt that is not set is false.
            if interrupt is not None and interrupt:
                self.unfinished = "the model was not built in time"
                return
            if form == "gap":
                self._gap_rows(t)
            else:
                self._free_rows(t)
        self._between_row()

    # -- what is constant ------------------------------------------------------------------------------------

    def _pinned_bytes(self, t: int) -> int:
        """Bytes that are resident all through stage ``t`` whatever is kept."""
        program = self.program
        made = [b for b, buffer in enumerate(program.buffers) if buffer.producer is not None and buffer.producer < t]
        total = sum(program.buffers[b].bytes for b in made if b in program.pinned)
        if t >= program.boundary:
            return total + program.late_bytes
        return total + sum(program.buffers[b].bytes for b in made if b in program.mutations)

    def _made_bytes(self, op: int, *, again: bool) -> int:
        outputs = self.program.made_by_rerun(op) if again else self.program.ops[op].outputs
        return self.program.ops[op].workspace_bytes + sum(self.program.buffers[b].bytes for b in outputs)

    def _is_hopeless(self) -> bool:
        program, chosen = self.program, set(self._chosen)
        for t, op in enumerate(program.ops):
            inputs = sum(program.buffers[b].bytes for b in op.inputs if b in chosen)
            if self._resident[t] + inputs + self._made_bytes(t, again=False) > self.budget:
                return True
        return self._resident[program.boundary] + program.between_excess_bytes > self.budget

    # -- columns ---------------------------------------------------------------------------------------------

    def _columns(self) -> None:
        """Columns that can matter: an op is run again, and a buffer held, only while somebody may still read it."""
        program, n = self.program, len(self.program.ops)
        limit = [last_rerun_stage(program, o) for o in range(n)]
        wanted_until = [-1] * len(program.buffers)
        useful_until = [-1] * n
        chosen = set(self._chosen)
        for o in range(n - 1, -1, -1):
            for b in program.ops[o].outputs:
                if b in chosen:
                    wanted_until[b] = max(max(r, useful_until[r]) for r in program.readers[b])
            useful_until[o] = min(limit[o], max((wanted_until[b] for b in program.ops[o].outputs), default=-1))
        columns = sum(max(useful_until[o] - o, 0) for o in range(n))
        columns += sum(max(wanted_until[b] - (program.buffers[b].producer or 0), 0) for b in self._chosen)
        if columns > MOST_COLUMNS:
            self.unfinished = (
                f"the model of {n:,} ops would have {columns:,} columns, and at most {MOST_COLUMNS:,} are built"
            )
            return
        unit = PERCENT / max(program.seconds, 1e-30)
        for t in range(n):
            for o in range(t):
                if t <= useful_until[o]:
                    self.run[t, o] = self.model.column(program.ops[o].seconds * unit, integer=True)
                    if program.ops[o].random:
                        self.state[t, o] = self.model.column()
            for b in self._chosen:
                producer = program.buffers[b].producer
                assert producer is not None
                if producer < t <= wanted_until[b]:
                    self.held[t, b] = self.model.column()

    def _ran(self, t: int, o: int) -> tuple[list[tuple[int, float]], float]:
        """Whether op ``o`` runs in stage ``t``, as terms and a constant."""
        if o == t:
            return [], 1.0
        return ([(self.run[t, o], 1.0)], 0.0) if (t, o) in self.run else ([], 0.0)

    def _live(self, t: int, b: int) -> bool:
        """Whether ``b`` can be resident in stage ``t``."""
        return (t, b) in self.held or self.program.buffers[b].producer == t

    def _events(self, t: int, b: int) -> list[int]:
        """Ops of stage ``t`` at whose slots something may happen to ``b``: its producer, then its readers."""
        producer = self.program.buffers[b].producer
        assert producer is not None
        return [producer, *(r for r in self.program.readers[b] if r == t or (t, r) in self.run)]

    def _fraction(self, t: int) -> float:
        """The unit of the rows of stage ``t``: one byte as a share of what they have room for."""
        return 1.0 / max(self.budget - self._resident[t], 1)

    # -- rows of both forms ------------------------------------------------------------------------------------

    def _state_rows(self) -> None:
        for (t, o), column in self.state.items():
            self.model.row("states", [(column, 1.0), (self.run[t, o], -1.0)], 0.0)
            if (t + 1, o) in self.state:
                self.model.row("states", [(column, 1.0), (self.state[t + 1, o], -1.0)], 0.0)

    def _state_terms(self, t: int, k: int) -> list[tuple[int, float]]:
        """Bytes of generator states while slot ``k`` of stage ``t`` runs."""
        found: list[tuple[int, float]] = []
        for o, op in enumerate(self.program.ops[: t + 1]):
            if not op.random:
                continue
            # In its own stage the state is taken right before the first run; later on, it goes after the last.
            at = t + 1 if o < k or o == t else t
            if (at, o) in self.state and not (o == t and k < t):
                found.append((self.state[at, o], float(op.state_bytes)))
            if o == k < t and (t, o) in self.run:
                found.append((self.run[t, o], float(op.state_bytes)))
        return found

    def _between_row(self) -> None:
        program, t = self.program, self.program.boundary
        if not program.between_excess_bytes or t == len(program.ops):
            return
        size = self._fraction(t)
        terms = [(c, program.buffers[b].bytes * size) for (s, b), c in self.held.items() if s == t]
        terms += [(c, program.ops[o].state_bytes * size) for (s, o), c in self.state.items() if s == t]
        left = self.budget - self._resident[t] - program.between_excess_bytes
        self.model.row("between", terms, upper=left * size + SLACK)

    # -- the gap form ------------------------------------------------------------------------------------------

    def _gap_rows(self, t: int) -> None:
        model = self.model
        buffers = [b for b in self._chosen if self._live(t, b)]
        events = {b: self._events(t, b) for b in buffers}
        for b in buffers:
            at = events[b]
            columns = self.there[t, b] = [model.column() for _ in at]
            before = [(self.held[t, b], 1.0)] if (t, b) in self.held else []
            made, first = self._ran(t, at[0])
            model.row("holds", [*before, *made, (columns[0], -1.0)], -first)
            for earlier, later in pairwise(columns):
                model.row("holds", [(earlier, 1.0), (later, -1.0)], 0.0)
            for reader, column in zip(at[1:], columns, strict=False):
                ran, sure = self._ran(t, reader)
                if sure:
                    model.lower[column] = 1.0
                else:
                    model.row("reads", [(column, 1.0), (ran[0][0], -1.0)], 0.0)
            if (t + 1, b) in self.held:
                model.row("holds", [(columns[-1], 1.0), (self.held[t + 1, b], -1.0)], 0.0)
        for k in range(t + 1):
            if k == t or (t, k) in self.run:
                self._gap_bytes(t, k, buffers, events)

    def _gap_bytes(self, t: int, k: int, buffers: Sequence[int], events: Mapping[int, Sequence[int]]) -> None:
        size = self._fraction(t)
        terms = [(c, value * size) for c, value in self._state_terms(t, k)]
        for b in buffers:
            at = events[b]
            if k <= at[0]:
                column = self.held.get((t, b))
            else:
                column = self.there[t, b][max(j for j, event in enumerate(at) if event < k)]
            if column is not None:
                terms.append((column, self.program.buffers[b].bytes * size))
        left = self.budget - self._resident[t]
        if k == t:
            left -= self._made_bytes(t, again=False)
        else:
            terms.append((self.run[t, k], self._made_bytes(k, again=True) * size))
        self.model.row("bytes", terms, upper=left * size + SLACK)

    # -- the free form -----------------------------------------------------------------------------------------

    def _free_rows(self, t: int) -> None:
        model, program = self.model, self.program
        buffers = [b for b in self._chosen if self._live(t, b)]
        leaving: dict[int, list[tuple[int, float]]] = {}
        size = self._fraction(t)
        for b in buffers:
            at = self._events(t, b)
            before = [(self.held[t, b], 1.0)] if (t, b) in self.held else []
            made, first = self._ran(t, at[0])
            for reader in at[1:]:
                ran, sure = self._ran(t, reader)
                model.row("reads", [*before, *made, *((c, -v) for c, v in ran)], sure - first)
            if (t + 1, b) in self.held:
                model.row("holds", [*before, *made, (self.held[t + 1, b], -1.0)], -first)
            for j, k in enumerate(at):
                if k == t:  # the next stage begins with what is held
                    continue
                column = self.free[t, b, k] = model.column()
                self._free_bounds(t, b, column, k, at[j + 1 :])
                leaving.setdefault(k, []).append((column, -program.buffers[b].bytes * size))
            if before and made:
                column = self.spare[t, b] = model.column()
                model.row("frees", [*before, (column, -1.0)], 0.0)
                model.row("frees", [*made, (column, -1.0)], 0.0)
                leaving.setdefault(at[0], []).append((column, -program.buffers[b].bytes * size))
        self._carried_bytes(t, buffers, leaving)

    def _free_bounds(self, t: int, b: int, column: int, k: int, later: Iterable[int]) -> None:
        ran, sure = self._ran(t, k)
        if not sure and not ran:
            self.model.upper[column] = 0.0
        elif ran:
            self.model.row("frees", [(ran[0][0], 1.0), (column, -1.0)], 0.0)
        if (t + 1, b) in self.held:
            self.model.row("frees", [(column, 1.0), (self.held[t + 1, b], 1.0)], upper=1.0)
        for reader in later:
            ran, sure = self._ran(t, reader)
            if sure:
                self.model.upper[column] = 0.0
            else:
                self.model.row("frees", [(column, 1.0), (ran[0][0], 1.0)], upper=1.0)

    def _carried_bytes(self, t: int, buffers: Sequence[int], leaving: Mapping[int, list[tuple[int, float]]]) -> None:
        """A column per slot: the bytes of chosen buffers before it, as a fraction of what is left in the stage."""
        model, program = self.model, self.program
        size, left = self._fraction(t), self.budget - self._resident[t]
        chosen = set(buffers)
        level = model.column(upper=float("inf"))
        start = [(self.held[t, b], program.buffers[b].bytes * size) for b in buffers if (t, b) in self.held]
        model.row("carried", [*start, (level, -1.0)], 0.0, 0.0)
        for k in range(t + 1):
            if k != t and (t, k) not in self.run and k not in leaving:
                continue
            states = [(c, value * size) for c, value in self._state_terms(t, k)]
            if k == t:
                room = (left - self._made_bytes(t, again=False)) * size + SLACK
                model.row("bytes", [(level, 1.0), *states], upper=room)
                return
            if (t, k) not in self.run:
                continue
            terms = [(level, 1.0), *states, (self.run[t, k], self._made_bytes(k, again=True) * size)]
            model.row("bytes", terms, upper=left * size + SLACK)
            kept = sum(program.buffers[b].bytes for b in program.ops[k].outputs if b in chosen)
            following = model.column(upper=float("inf"))
            terms = [(level, 1.0), (self.run[t, k], kept * size), *leaving.get(k, []), (following, -1.0)]
            model.row("carried", terms, 0.0, 0.0)
            level = following

    # -- solutions -----------------------------------------------------------------------------------------------

    def start(self, reruns: Iterable[tuple[int, int]]) -> dict[int, float]:
        """Columns ``run`` of a plan that the solver may begin with; empty if the model has no column for one."""
        chosen = {(t, o) for o, t in reruns}
        if not chosen.issubset(self.run):
            return {}
        return {column: float(key in chosen) for key, column in self.run.items()}

    def reruns(self, values: NDArray[np.float64]) -> list[tuple[int, int]]:
        """Reruns ``(op, stage)`` of a solution."""
        return [(o, t) for (t, o), column in self.run.items() if values[column] > 0.5]
