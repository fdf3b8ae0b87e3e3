"""Simulated annealing of whole sequences, order included: FastSA (Jin et al., NeurIPS 2023, sections 3 and 4).

The state is a sequence of runs (``search.sequence``); a move adds, takes away or shifts a single run. First runs leave
captured order wherever that is legal, which is what this planner has over the others: some budgets need no rerun at
all if ops run in a better order.
1. From the unplanned step, several times: anneal ``max(budget, peak) * cost``, here with a weight on the bytes.
2. From what fits (that, a greedy plan of small effort, seeds): anneal the cost among sequences that fit.

A unit of effort is many moves, each far cheaper than a move of the local search in ``greedy``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import numpy as np

from ebbtide.planners.base import FREE_ORDER, Answer, Problem, Progress, Status, planner
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.search import sequence as Q
from ebbtide.planners.search.greedy import PROVEN, assert_within, greedy
from ebbtide.planners.search.interval_state import COST_RESOLUTION
from ebbtide.planners.search.jit import Ints, Words
from ebbtide.planners.search.layout import H_ADD, H_RANDOM, H_TOP, H_TREE_SIZE
from ebbtide.planners.search.orders import precedences
from ebbtide.step.legality import check
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.unplanned import unplanned_schedule

__all__ = ["HOT", "OVER", "WARM", "RunSequence", "anneal", "search"]

Order = list[int | None]
MOVES_PER_EFFORT = 200  # 4 to 9 s for the default effort and 70 to 350 ops
GREEDY_SHARE = 0.1  # of the effort, for the greedy plan to start from
SLOTS_PER_OP = 16  # most are empty, so that a run finds room nearly anywhere
ROOM_PER_OP = 4  # runs, the first included
CHUNK_SECONDS = 0.03
HOT, WARM, COLD = 2e-2, 1e-3, 1e-5  # temperatures, as relative changes of the score: first, of step 2, last
OVER = 0.5  # weight of bytes over the budget against cost; chosen on a few runs of two random layered graphs
ROUNDS = 3  # from the unplanned step: free orders differ more between seeds than within one long run
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


def search(sequence: RunSequence, problem: Problem, moves: int, seed: int, *, over: float, hot: float) -> None:
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


@planner("anneal")
def anneal(problem: Problem) -> Answer:
    """Annealed sequences from the unplanned step, a greedy plan and the seeds."""
    if (kept := keep_all(problem)).status is Status.OPTIMAL:
        return kept
    sequence = RunSequence(problem.program, problem.above_budget_bytes)
    quick = greedy(replace(problem, effort=round(problem.effort * GREEDY_SHARE)))
    starts = [] if quick.schedule is None else [quick.schedule]
    for schedule in (*starts, *problem.seeds):
        _offer(sequence, schedule)
    moves = problem.effort * MOVES_PER_EFFORT // (ROUNDS + 1)
    for turn in range(ROUNDS):
        sequence.load(unplanned_schedule(problem.program).computes)
        search(sequence, problem, moves, problem.seed + turn, over=OVER, hot=HOT)
    if sequence.best_overhead < float("inf"):
        sequence.load(sequence.best_order())
        search(sequence, problem, moves, problem.seed + ROUNDS, over=0.0, hot=WARM)
    return _answer(problem, sequence)


def _offer(sequence: RunSequence, schedule: Schedule) -> None:
    """Take a start point as the best if it is legal, fits and is cheaper."""
    order = schedule.computes
    if not check(sequence.program, Schedule.from_computes(sequence.program, order)) and sequence.load(order):
        sequence.keep_if_best()


def _answer(problem: Problem, sequence: RunSequence) -> Answer:
    """The best sequence, after simulator and legality checker have agreed to it."""
    notes = {"moves": str(problem.effort * MOVES_PER_EFFORT)}
    interrupted = bool(problem.interrupt)
    if sequence.best_overhead == float("inf"):
        status = Status.TIME_LIMIT if interrupted else Status.INFEASIBLE
        return Answer(status, None, bound_class=FREE_ORDER, notes=notes)
    schedule = Schedule.from_computes(problem.program, sequence.best_order())
    assert_within(problem, schedule)
    if sequence.best_overhead <= PROVEN:  # no schedule runs less than every op once
        return Answer(Status.OPTIMAL, schedule, bound=0.0, bound_class=FREE_ORDER, notes=notes)
    status = Status.TIME_LIMIT if interrupted else Status.FEASIBLE
    return Answer(status, schedule, bound_class=FREE_ORDER, notes=notes)
