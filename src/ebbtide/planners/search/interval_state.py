"""The incremental simulator of all planners: exact bytes of every stage while reruns are added and taken away.

An :class:`IntervalState` is a set of reruns over a program in captured order (definitions in ``interval_kernels``). A
candidate is applied for real, measured exactly and rolled back; nothing is estimated. What leaves it is the
canonical schedule of its order of runs, whose bytes are those of the state.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import cast

import numpy as np

from ebbtide.planners.search import interval_kernels as _runs
from ebbtide.planners.search import layout as L
from ebbtide.planners.search.jit import Ints, Words
from ebbtide.planners.search.segment_tree import value
from ebbtide.step.arrays import Flat, flat
from ebbtide.step.program import Program, analysis
from ebbtide.step.schedule import Schedule

__all__ = ["IntervalState", "reruns_of"]

COST_RESOLUTION = 1e-9  # seconds are counted in this fraction of the step: integers, so that undoing is exact
NO_LIMIT = 1 << 62
UNUSED = -(1 << 60)  # bytes of tree leaves that are no stage
RERUNS_PER_OP = 8  # room for reruns; Revolve repeats a step about log(steps) times (Griewank & Walther 2000)
MOST_ROOM = 1 << 16  # where a chain has one slot, each step reruns all below it: half the steps squared
JOURNAL_ROWS = 1 << 17


class IntervalState:
    """Reruns over a program in captured order, with the bytes above the start of every stage.

    Args:
        program: with costs.

    Attributes:
        program: as given.
        memory: what compiled searches work on, laid out as ``search.layout`` says.
        base_cost: integer cost of every op once.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._array = _memory(program)
        self.memory = cast(Words, self._array)
        rows = self._array[L.HEADER :][: L.ROW * len(program.ops)].reshape(-1, L.ROW)
        self.base_cost = int(rows[:, L.OP_COST].sum())

    @property
    def stages(self) -> int:
        """Number of stages, the end of the step included."""
        return len(self.program.ops) + 1

    @property
    def peak_bytes(self) -> int:
        """The peak above the step's start, exactly what the simulator says of :meth:`to_schedule`."""
        return max(int(self.memory[self.memory[L.H_TOP] + 1]), 0)

    @property
    def cost(self) -> int:
        """The objective of searches, in units of :data:`COST_RESOLUTION`: the cost of all reruns."""
        return int(self.memory[L.H_COST])

    @property
    def overhead(self) -> float:
        """:attr:`cost` as a fraction of the unplanned step."""
        return self.cost / max(self.base_cost, 1)

    def allow_work(self, runs: int) -> None:
        """Let searches walk this many more runs, and then stop with the best they have: effort by count, no clock."""
        self.memory[L.H_WORK_LIMIT] = self.memory[L.H_WORK] + runs

    def allow_early(self, allowed: bool) -> None:
        """Let searches place reruns before the stage that uses them, which they may from the start, or not."""
        self.memory[L.H_EARLY] = allowed

    @property
    def exhausted(self) -> bool:
        """Whether the work allowed is used up."""
        return int(self.memory[L.H_WORK]) > int(self.memory[L.H_WORK_LIMIT])

    def stage_bytes(self, stage: int) -> int:
        """The peak within one stage."""
        return int(value(self.memory, stage))

    def all_stage_bytes(self) -> Ints:
        """The peak within every stage, shape ``(stages,)``."""
        size, top, add = (int(self.memory[word]) for word in (L.H_TREE_SIZE, L.H_TOP, L.H_ADD))
        above, width = np.zeros(1, np.int64), 1  # what is added to all leaves below each node of a level
        while width < size:
            above = np.repeat(above + self._array[add + width : add + 2 * width], 2)
            width *= 2
        return (self._array[top + size : top + 2 * size] + above)[: self.stages]

    def add(self, op: int, stage: int) -> bool:
        """Rerun ``op`` just before the first run of op ``stage``; whether that is possible and was done."""
        return bool(_runs.add_run(self.memory, op, stage))

    def remove(self, op: int, stage: int) -> bool:
        """Take away a rerun that :attr:`reruns` lists; whether it was done."""
        return bool(_runs.remove_run(self.memory, op, stage))

    def mark(self) -> int:
        """A point to which :meth:`rollback` can return."""
        return int(self.memory[L.H_JOURNAL])

    def rollback(self, mark: int) -> None:
        """Take back every change since ``mark``."""
        _runs.undo(self.memory, mark)

    def commit(self) -> None:
        """Forget the journal: everything so far stays."""
        self.memory[L.H_JOURNAL] = 0

    @property
    def reruns(self) -> list[tuple[int, int]]:
        """All reruns as ``(op, stage)``, ascending by stage, then op."""
        node = self._array[self._array[L.H_NODES] : self._array[L.H_HIGH]].reshape(-1, L.N_COLUMNS)
        used = node[node[:, L.N_OP] >= 0]
        runs = used[np.lexsort((used[:, L.N_OP], used[:, L.N_STAGE])), :2]
        return list(zip(runs[:, 0].tolist(), runs[:, 1].tolist(), strict=True))

    def load_best(self) -> None:
        """Replace all by what the compiled search last saved as its best."""
        self.load(cast("list[tuple[int, int]]", self._best_rows().tolist()))

    def _best_rows(self) -> Ints:
        """Rows saved as the best, shape ``(count, 2)``."""
        first = int(self.memory[L.H_BEST_AT])
        return self._array[first : first + 2 * int(self.memory[L.H_BEST_COUNT])].reshape(-1, 2)

    def load(self, reruns: Iterable[tuple[int, int]]) -> None:
        """Replace all reruns; those that may not run where they are placed are left out."""
        pairs = np.fromiter(chain.from_iterable(reruns), np.int64)
        _runs.load_runs(self.memory, cast(Words, pairs), len(pairs) // 2)

    def order(self) -> list[int | None]:
        """Ops in the order they run, ``None`` at the boundary."""
        first = list(range(len(self.program.ops)))
        runs = [*self.reruns, *zip(first, first, strict=True)]
        runs.sort(key=lambda run: (run[1], run[0]))  # an op's first run comes last in its stage
        found: list[int | None] = [op for op, _ in runs]
        found.insert(sum(stage < self.program.boundary for _, stage in runs), None)
        return found

    def to_schedule(self) -> Schedule:
        """The canonical schedule of :meth:`order`."""
        return Schedule.from_computes(self.program, self.order())


def reruns_of(program: Program, schedule: Schedule) -> list[tuple[int, int]] | None:
    """The reruns of a schedule as ``(op, stage)``, each at most once per stage.

    Returns:
        ``None`` if first runs are not in captured order, so that no interval state stands for it.
    """
    reruns: list[tuple[int, int]] = []
    stage = 0
    for op in program.before_updates(schedule.computes):
        if op is None:
            continue
        if op > stage:
            return None
        if op == stage:
            stage += 1
        elif stage < len(program.ops) and (op, stage) not in reruns[-stage - 1 :]:
            reruns.append((op, stage))
    return reruns if stage == len(program.ops) else None


def _memory(program: Program) -> Ints:
    """The memory of the unplanned step, laid out as ``search.layout`` says."""
    return _with_room(_unplanned(program))


def _with_room(image: Ints) -> Ints:
    """Memory that begins with ``image``, which ends where reruns begin, all of them free."""
    room, nodes_at = int(image[L.H_ROOM]), int(image[L.H_NODES])
    memory = np.zeros(int(image[L.H_END]), np.int64)
    memory[:nodes_at] = image
    nodes = memory[nodes_at : nodes_at + room * L.N_COLUMNS].reshape(-1, L.N_COLUMNS)
    nodes[:, L.N_OP] = nodes[-1, L.N_IN_STAGE] = -1
    nodes[:-1, L.N_IN_STAGE] = nodes_at + L.N_COLUMNS * np.arange(1, room)
    return memory


@analysis
def _unplanned(program: Program) -> Ints:
    """Header, ops, buffers, lists and tree of the unplanned step: the memory up to the first rerun."""
    form = flat(program)
    n = len(program.ops)
    header = np.zeros(L.HEADER, np.int64)
    header[L.H_OPS], header[L.H_RANDOM] = n, 1
    header[L.H_WORK_LIMIT], header[L.H_EARLY] = NO_LIMIT, 1
    header[L.H_BOUNDARY], header[L.H_BETWEEN] = program.boundary, program.between_excess_bytes
    room = max(RERUNS_PER_OP * n + 1024, min(n * n // 4, MOST_ROOM))
    tree_size = 1 << n.bit_length()
    journal_rows = JOURNAL_ROWS + 8 * n
    header[L.H_TREE_SIZE], header[L.H_JOURNAL_ROWS], header[L.H_ROOM] = tree_size, journal_rows, room
    length = L.HEADER + (n + 1) * L.ROW

    def place(size: int, at_word: int) -> None:
        nonlocal length
        header[at_word] = length
        length += size

    place(len(program.buffers) * L.B_COLUMNS, L.H_BUFFERS)
    header[L.H_BUFFERS_END] = length
    rows, buffers, links = _tables(program, int(header[L.H_BUFFERS]), length)
    length += links.size
    place(2 * tree_size, L.H_TOP)
    place(room * L.N_COLUMNS, L.H_NODES)
    header[L.H_FREE] = header[L.H_HIGH] = header[L.H_NODES]
    place(2 * tree_size, L.H_ADD)
    place(3 * journal_rows, L.H_JOURNAL_AT)
    place(n + 2, L.H_TOUCHED_AT)
    place(n + 2, L.H_STEPS_AT)
    place(room, L.H_STACK_AT)
    place(2 * room, L.H_PENDING_AT)
    place(3 * (L.OFFERS + 1), L.H_OFFERS_AT)
    place(2 * room, L.H_BEST_AT)
    place((n + 2) * L.C_COLUMNS, L.H_CLOCKS)
    place(len(program.buffers), L.H_BEST_HOLDS)
    place(n + 2, L.H_NEEDS)
    header[L.H_END] = length
    parts = [header, rows.ravel(), buffers.ravel(), links, _tree(tree_size, _through_bytes(program, form))]
    memory = _with_room(np.concatenate(parts))
    _runs.load_runs(cast(Words, memory), cast(Words, np.zeros(0, np.int64)), 0)
    _runs.rebuild_locals(cast(Words, memory))
    return memory[: header[L.H_NODES]].copy()


def _tree(size: int, stage_bytes: Ints) -> Ints:
    """The maxima of a segment tree with ``size`` leaves, the first of which are ``stage_bytes``."""
    tree = np.zeros(2 * size, np.int64)
    level = np.full(size, UNUSED, np.int64)
    level[: len(stage_bytes)] = stage_bytes
    while size >= 1:
        tree[size : 2 * size] = level
        level = level.reshape(-1, 2).max(1) if size > 1 else level
        size >>= 1
    return tree


def _through_bytes(program: Program, form: Flat) -> Ints:
    """Bytes that pass through each stage of the unplanned step: late ones, and buffers from first run to last read."""
    n = len(program.ops)
    steps = np.zeros(n + 3, np.int64)  # what a stage has more than the one before
    steps[program.boundary] += program.late_bytes
    last = np.where(form.pinned, n + 1, np.maximum(form.last_readers(), form.producer))
    last = np.where(form.mutation, program.boundary, last)
    passing = np.flatnonzero((form.producer >= 0) & (last > form.producer))
    np.add.at(steps, form.producer[passing] + 1, form.bytes[passing])
    np.subtract.at(steps, last[passing], form.bytes[passing])
    return np.cumsum(steps)[: n + 1]


def _tables(program: Program, buffers_at: int, links_at: int) -> tuple[Ints, Ints, Ints]:
    """The rows of ops and of buffers, and the lists of inputs, outputs and readers behind them."""
    form, n = flat(program), len(program.ops)
    address = buffers_at + L.B_COLUMNS * np.arange(len(program.buffers))
    links = np.concatenate([address[form.reads.items], address[form.makes.items], form.readers.items])
    rows = np.zeros((n + 1, L.ROW), np.int64)
    ops = rows[:n]
    ops[:, L.OP_WORKSPACE], ops[:, L.OP_STATE] = form.workspace_bytes, form.state_bytes
    ops[:, L.OP_MADE], ops[:, L.OP_REMADE] = form.made_bytes, form.remade_bytes
    cost = np.maximum(np.rint(form.seconds / (max(program.seconds, 1e-30) * COST_RESOLUTION)), 1)
    ops[:, L.OP_COST] = ops[:, L.OP_ESTIMATE] = cost.astype(np.int64)
    last = np.where(form.reads_mutated, program.boundary - 1, n - 1)
    fits_journal = np.diff(form.reads.first) + np.diff(form.makes.first) < L.JOURNAL_RESERVE - 16
    ops[:, L.OP_LIMIT] = np.where(form.rerunnable & fits_journal, last, np.arange(n))
    made_at = links_at + len(form.reads.items)
    for first, end, lists, at in (
        (L.OP_IN, L.OP_IN_END, form.reads, links_at),
        (L.OP_OUT, L.OP_OUT_END, form.makes, made_at),
    ):
        ops[:, first], ops[:, end] = at + lists.first[:-1], at + lists.first[1:]
    rows[:, L.N_OP] = rows[:, L.N_STAGE] = np.arange(n + 1)
    rows[:, L.N_OF_OP] = rows[:, L.N_IN_STAGE] = rows[:, L.OP_FORBID] = -1
    rows[:, L.S_LOADS] = rows[:, L.S_HOLDS] = -1
    rows[:, L.S_HEAD] = L.HEADER + L.ROW * np.arange(n + 1)
    buffers = np.zeros((len(program.buffers), L.B_COLUMNS), np.int64)
    buffers[:, L.B_LOADS] = buffers[:, L.B_HOLD] = buffers[:, L.B_NEXT_HOLD] = buffers[:, L.B_TIER] = -1
    buffers[:, L.B_FORBID] = -1
    buffers[:, L.B_BYTES], buffers[:, L.B_PRODUCER] = form.bytes, form.producer
    buffers[:, L.B_PINNED] = form.pinned | form.mutation
    read_at = made_at + len(form.makes.items)
    buffers[:, L.B_READ], buffers[:, L.B_READ_END] = read_at + form.readers.first[:-1], read_at + form.readers.first[1:]
    return rows, buffers, links
