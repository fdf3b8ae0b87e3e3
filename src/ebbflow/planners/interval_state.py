"""The incremental simulator of all planners: exact bytes of every stage while reruns are added and taken away.

An :class:`IntervalState` is a set of reruns over a program in captured order (definitions in ``_runs``). A
candidate is applied for real, measured exactly and rolled back; nothing is estimated. What leaves it is the
canonical schedule of its order of runs, whose bytes are those of the state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import numpy as np

from ebbflow.planners import _layout as L
from ebbflow.planners import _runs
from ebbflow.planners._jit import Ints, Words
from ebbflow.planners._segment_tree import value
from ebbflow.program import Program
from ebbflow.schedule import Schedule

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
        memory: what compiled searches work on, laid out as ``_layout`` says.
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
    def overhead(self) -> float:
        """Cost of all reruns as a fraction of the unplanned step."""
        return int(self.memory[L.H_COST]) / max(self.base_cost, 1)

    def allow_work(self, runs: int) -> None:
        """Let searches walk this many more runs, and then stop with the best they have: effort by count, no clock."""
        self.memory[L.H_WORK_LIMIT] = self.memory[L.H_WORK] + runs

    @property
    def exhausted(self) -> bool:
        """Whether the work allowed is used up."""
        return int(self.memory[L.H_WORK]) > int(self.memory[L.H_WORK_LIMIT])

    def stage_bytes(self, stage: int) -> int:
        """The peak within one stage."""
        return int(value(self.memory, stage))

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
        return sorted(((int(o), int(t)) for o, t in used[:, :2]), key=lambda run: (run[1], run[0]))

    def best_reruns(self) -> list[tuple[int, int]]:
        """The reruns that the compiled search last saved as its best."""
        first = int(self.memory[L.H_BEST_AT])
        pairs = self._array[first : first + 2 * int(self.memory[L.H_BEST_COUNT])].reshape(-1, 2)
        return [(int(o), int(t)) for o, t in pairs]

    def load(self, reruns: Iterable[tuple[int, int]]) -> None:
        """Replace all reruns; those that may not run where they are placed are left out."""
        pairs = np.array([word for run in reruns for word in run], np.int64)
        _runs.load_runs(self.memory, cast(Words, pairs), len(pairs) // 2)

    def order(self) -> list[int | None]:
        """Ops in the order they run, ``None`` at the boundary."""
        program = self.program
        found: list[int | None] = []
        runs = self.reruns
        position = 0
        for stage in range(len(program.ops) + 1):
            if stage == program.boundary:
                found.append(None)
            while position < len(runs) and runs[position][1] == stage:
                found.append(runs[position][0])
                position += 1
            if stage < len(program.ops):
                found.append(stage)
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
    for op in schedule.computes:
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
    """The memory of the unplanned step, laid out as ``_layout`` says."""
    n = len(program.ops)
    header = np.zeros(L.HEADER, np.int64)
    header[L.H_OPS], header[L.H_RANDOM], header[L.H_FREE] = n, 1, -1
    header[L.H_WORK_LIMIT] = NO_LIMIT
    header[L.H_BOUNDARY], header[L.H_BETWEEN] = program.boundary, program.between_excess_bytes
    room = max(RERUNS_PER_OP * n + 1024, min(n * n // 4, MOST_ROOM))
    tree_size = 1 << n.bit_length()
    journal_rows = JOURNAL_ROWS + 8 * n
    rows = np.zeros((n + 1, L.ROW), np.int64)
    parts = [header, rows.ravel()]
    length = header.size + rows.size

    def place(size: int, at_word: int) -> None:
        nonlocal length
        header[at_word] = length
        parts.append(np.zeros(size, np.int64))
        length += size

    place(len(program.buffers) * L.B_COLUMNS, L.H_BUFFERS)
    header[L.H_BUFFERS_END] = length
    links = _links(program, rows, parts[-1].reshape(-1, L.B_COLUMNS), int(header[L.H_BUFFERS]), length)
    parts.append(links)
    length += links.size
    place(room * L.N_COLUMNS, L.H_NODES)
    nodes = parts[-1].reshape(-1, L.N_COLUMNS)
    header[L.H_FREE] = header[L.H_HIGH] = header[L.H_NODES]
    nodes[:, L.N_OP] = nodes[-1, L.N_IN_STAGE] = -1
    nodes[:-1, L.N_IN_STAGE] = header[L.H_NODES] + L.N_COLUMNS * np.arange(1, room)
    header[L.H_TREE_SIZE], header[L.H_JOURNAL_ROWS], header[L.H_ROOM] = tree_size, journal_rows, room
    place(2 * tree_size, L.H_TOP)
    place(2 * tree_size, L.H_ADD)
    place(3 * journal_rows, L.H_JOURNAL_AT)
    place(n + 2, L.H_TOUCHED_AT)
    place(n + 2, L.H_STEPS_AT)
    place(room, L.H_STACK_AT)
    place(2 * room, L.H_PENDING_AT)
    place(3 * (L.OFFERS + 1), L.H_OFFERS_AT)
    place(2 * room, L.H_BEST_AT)
    memory = np.concatenate(parts)
    _lay_through_bytes(program, memory)
    return memory


def _lay_through_bytes(program: Program, memory: Ints) -> None:
    """The tree of the unplanned step: late bytes, and every buffer between its first run and last read."""
    n = len(program.ops)
    steps = np.zeros(n + 3, np.int64)  # what a stage has more than the one before
    mutations = frozenset(program.mutations)
    steps[program.boundary] += program.late_bytes
    for b, buffer in enumerate(program.buffers):
        if buffer.producer is not None:
            last = n + 1 if b in program.pinned else max(program.readers[b], default=buffer.producer)
            last = program.boundary if b in mutations else last
            if last > buffer.producer:
                steps[buffer.producer + 1] += buffer.bytes
                steps[last] -= buffer.bytes
    size, top = int(memory[L.H_TREE_SIZE]), int(memory[L.H_TOP])
    level = np.full(size, UNUSED, np.int64)
    level[: n + 1] = np.cumsum(steps)[: n + 1]
    while size >= 1:
        memory[top + size : top + 2 * size] = level
        level = level.reshape(-1, 2).max(1) if size > 1 else level
        size >>= 1
    _runs.load_runs(cast(Words, memory), cast(Words, np.zeros(0, np.int64)), 0)
    _runs.rebuild_locals(cast(Words, memory))


def _links(program: Program, rows: Ints, buffers: Ints, buffers_at: int, links_at: int) -> Ints:
    """Fill the rows of ops and buffers; the lists of inputs, outputs and readers behind them."""
    links: list[int] = []

    def append(items: Iterable[int]) -> tuple[int, int]:
        first = links_at + len(links)
        links.extend(items)
        return first, links_at + len(links)

    n = len(program.ops)
    unit = max(program.seconds, 1e-30) * COST_RESOLUTION
    address = [buffers_at + b * L.B_COLUMNS for b in range(len(program.buffers))]
    for index, op in enumerate(program.ops):
        row = rows[index]
        row[L.OP_WORKSPACE], row[L.OP_STATE] = op.workspace_bytes, op.state_bytes
        row[L.OP_MADE] = sum(program.buffers[b].bytes for b in op.outputs)
        row[L.OP_REMADE] = sum(program.buffers[b].bytes for b in program.made_by_rerun(index))
        row[L.OP_COST] = row[L.OP_ESTIMATE] = max(round(op.seconds / unit), 1)
        last = program.boundary - 1 if op.reads_mutated else n - 1
        fits_journal = len(op.inputs) + len(op.outputs) < L.JOURNAL_RESERVE - 16
        row[L.OP_LIMIT] = last if op.rerunnable and fits_journal else index
        row[L.OP_IN], row[L.OP_IN_END] = append(address[b] for b in op.inputs)
        row[L.OP_OUT], row[L.OP_OUT_END] = append(address[b] for b in op.outputs)
    rows[:, L.N_OP] = rows[:, L.N_STAGE] = np.arange(n + 1)
    rows[:, L.N_OF_OP] = rows[:, L.N_IN_STAGE] = rows[:, L.OP_FORBID] = -1
    rows[:, L.S_HEAD] = L.HEADER + L.ROW * np.arange(n + 1)
    pinned = program.pinned.union(program.mutations)
    for index, buffer in enumerate(program.buffers):
        row = buffers[index]
        row[L.B_BYTES], row[L.B_PINNED] = buffer.bytes, index in pinned
        row[L.B_PRODUCER] = -1 if buffer.producer is None else buffer.producer
        row[L.B_READ], row[L.B_READ_END] = append(program.readers[index])
    return np.array(links, np.int64)
