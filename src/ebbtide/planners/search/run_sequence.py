"""A sequence of runs in the numba memory of ``search.sequence``, read and changed from Python, and its annealing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import cast

import numpy as np

from ebbtide.planners.base import Problem, Progress
from ebbtide.planners.search import sequence as Q
from ebbtide.planners.search.interval_state import COST_RESOLUTION
from ebbtide.planners.search.jit import Ints, Words
from ebbtide.planners.search.layout import H_ADD, H_RANDOM, H_TOP, H_TREE_SIZE
from ebbtide.planners.search.orders import precedences
from ebbtide.step.program import Program

__all__ = ["HOT", "OVER", "WARM", "RunSequence", "anneal_sequence"]

Order = list[int | None]
SLOTS_PER_OP = 16  # most are empty, so that a run finds room nearly anywhere
ROOM_PER_OP = 4  # runs, the first included
CHUNK_SECONDS = 0.03
HOT, WARM, COLD = 2e-2, 1e-3, 1e-5  # temperatures, as relative changes of the score: at first, of what fits, at last
OVER = 0.5  # weight of bytes over the budget against cost; chosen on a few runs of two random layered graphs
NEVER = 1 << 62


class RunSequence:
    """A sequence of runs with its bytes (``search.sequence``).

    Args:
        program: with costs.
        above_budget_bytes: what sequences are held against.
    """

    def __init__(self, program: Program, above_budget_bytes: int) -> None:
        self.program = program
        self._array = _memory(program, above_budget_bytes)
        self.memory = cast(Words, self._array)

    @property
    def peak_bytes(self) -> int:
        """The peak above the step's start, exactly what the simulator says of the canonical schedule."""
        return max(int(self.memory[self.memory[H_TOP] + 1]), 0)

    @property
    def overhead(self) -> float:
        """Cost of all reruns as a fraction of the unplanned step."""
        return int(self.memory[Q.Q_COST]) / int(self.memory[Q.Q_BASE]) - 1.0

    @property
    def best_overhead(self) -> float:
        """:attr:`overhead` of the best sequence that fits; infinite if there is none."""
        cost = int(self.memory[Q.Q_BEST_COST])
        return cost / int(self.memory[Q.Q_BASE]) - 1.0 if cost < NEVER else float("inf")

    def load(self, order: Order) -> bool:
        """Replace the sequence by a legal order of runs; false if it is too long."""
        if len(order) > int(self.memory[Q.Q_ROOM]):
            return False
        first = int(self.memory[Q.Q_ORDER_AT])
        count = len(self.program.ops)
        self._array[first : first + len(order)] = [count if o is None else o for o in order]
        Q.lay_order(self.memory, first, len(order))
        return True

    def order(self) -> Order:
        """Ops in the order they run, ``None`` at the boundary."""
        first = int(self.memory[Q.Q_ORDER_AT])
        return self._read(first, Q.save_order(self.memory, first))

    def best_order(self) -> Order:
        """:meth:`order` of the best sequence that fits."""
        return self._read(int(self.memory[Q.Q_BEST_AT]), int(self.memory[Q.Q_BEST]))

    def keep_if_best(self) -> None:
        """Make the present sequence the best if it fits and is cheaper."""
        memory = self.memory
        if memory[memory[H_TOP] + 1] <= memory[Q.Q_BUDGET] and memory[Q.Q_COST] < memory[Q.Q_BEST_COST]:
            memory[Q.Q_BEST_COST] = memory[Q.Q_COST]
            memory[Q.Q_BEST] = Q.save_order(memory, memory[Q.Q_BEST_AT])

    def _read(self, first: int, count: int) -> Order:
        ops = len(self.program.ops)
        return [None if o == ops else int(o) for o in self._array[first : first + count]]


def _memory(program: Program, budget: int) -> Ints:
    """The memory of an empty sequence, laid out as ``search.sequence`` says."""
    n = len(program.ops)
    header = np.zeros(Q.Q_HEADER, np.int64)
    rows = np.zeros((n + 1, Q.R_COLUMNS), np.int64)
    buffers = np.zeros((len(program.buffers), Q.V_COLUMNS), np.int64)
    buffers_at = header.size + rows.size
    links = _links(program, rows, buffers, buffers_at, buffers_at + buffers.size)
    room = ROOM_PER_OP * n + 64
    slots = 1 << (SLOTS_PER_OP * n + 4 * 64).bit_length()
    header[Q.Q_OPS], header[H_TREE_SIZE], header[Q.Q_ROOM] = n, slots, room
    header[Q.Q_BUDGET], header[Q.Q_BEST_COST] = budget, NEVER
    header[Q.Q_BASE] = rows[:, Q.R_COST].sum()
    header[Q.Q_LATE], header[Q.Q_EXCESS] = program.late_bytes, program.between_excess_bytes
    header[Q.Q_MUTATED] = sum(program.buffers[b].bytes for b in program.mutations)
    length = buffers_at + buffers.size + links.size
    tables = (
        (Q.Q_OP_AT, slots),
        (Q.Q_NEXT_AT, slots),
        (Q.Q_INDEX_AT, slots),
        (H_TOP, 2 * slots),
        (H_ADD, 2 * slots),
        (Q.Q_RUNS_AT, room + 1),
        (Q.Q_REPEATED_AT, n + 1),
        (Q.Q_BEST_AT, room + 1),
        (Q.Q_ORDER_AT, room + 1),
        (Q.Q_LOG_AT, 3 * (Q.LOG_ROWS + 4)),
    )
    for word, size in tables:
        header[word] = length
        length += size
    memory = np.zeros(length, np.int64)
    filled = np.concatenate([header, rows.ravel(), buffers.ravel(), links])
    memory[: filled.size] = filled
    return memory


def _links(program: Program, rows: Ints, buffers: Ints, buffers_at: int, links_at: int) -> Ints:
    """Fill the rows of ops and buffers; the lists behind them."""
    links: list[int] = []

    def append(items: Iterable[int]) -> tuple[int, int]:
        first = links_at + len(links)
        links.extend(items)
        return first, links_at + len(links)

    outputs = program.pinned.union(program.mutations)
    address = [buffers_at + b * Q.V_COLUMNS for b in range(len(program.buffers))]
    before: list[list[int]] = [[] for _ in rows]
    after: list[list[int]] = [[] for _ in rows]
    for first, second in precedences(program):
        before[second].append(first)
        after[first].append(second)
    unit = max(program.seconds, 1e-30) * COST_RESOLUTION
    for index, row in enumerate(rows):
        row[Q.R_BEFORE], row[Q.R_BEFORE_END] = append(before[index])
        row[Q.R_AFTER], row[Q.R_AFTER_END] = append(after[index])
    for index, op in enumerate(program.ops):
        row = rows[index]
        row[Q.R_COST] = max(round(op.seconds / unit), 1)
        row[Q.R_WORKSPACE], row[Q.R_STATE] = op.workspace_bytes, op.state_bytes
        row[Q.R_MAY_REPEAT], row[Q.R_EARLY] = op.rerunnable, op.reads_mutated
        row[Q.R_IN], row[Q.R_IN_END] = append(address[b] for b in op.inputs if b not in outputs)
        row[Q.R_OUT], row[Q.R_OUT_END] = append(address[b] for b in op.outputs)
        for b in op.outputs[len(op.outputs) - op.once :]:
            buffers[b, Q.V_ONCE] = 1
    for index, buffer in enumerate(program.buffers):
        row = buffers[index]
        row[Q.V_BYTES] = buffer.bytes
        row[Q.V_PRODUCER] = -1 if buffer.producer is None else buffer.producer
        row[Q.V_KIND] = Q.MUTATION if index in program.mutations else Q.PINNED if index in program.pinned else 0
        row[Q.V_READ], row[Q.V_READ_END] = append(program.readers[index])
    return np.array(links, np.int64)


def anneal_sequence(sequence: RunSequence, problem: Problem, moves: int, seed: int, *, over: float, hot: float) -> None:
    """Anneal in chunks, between which the interrupt is looked at and progress is told.

    Args:
        sequence: changed in place; the best that fits is kept in it, and a sequence without reruns ends the search.
        problem: whose interrupt and progress are meant.
        moves: how many to try.
        seed: of the random choices.
        over: weight of bytes over the budget against cost; 0 for a sequence that fits and is to stay so.
        hot: first temperature, as a relative change of the score.
    """
    memory = sequence.memory
    # xorshift needs a state other than 0; a large odd multiplier spreads small seeds (Knuth's golden ratio).
    memory[H_RANDOM] = ((seed + 1) * 0x9E3779B97F4A7C15 & 0x7FFFFFFFFFFFFFFF) | 1
    first, chunk = 0, 256
    while first < moves and not problem.interrupt and sequence.best_overhead > 0.0:
        begin = time.perf_counter()
        last = min(first + chunk, moves)
        Q.anneal_runs(memory, first, last, moves, hot, COLD, over)
        first = last
        seconds = time.perf_counter() - begin
        chunk = max(64, min(2 * chunk, int(chunk * CHUNK_SECONDS / max(seconds, 1e-6))))
        best = sequence.best_overhead
        problem.progress(Progress("annealing sequences", best if best < float("inf") else None))
