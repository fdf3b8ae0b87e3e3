"""Interruptible searches on an interval state: repair to a budget, clean up, time transfers, anneal, descend.

What they make small is the state's objective: the cost of all reruns, or where buffers may be moved the makespan.
Compiled moves run in chunks of some 30 ms, between which the interrupt is looked at and progress is told. What a
search does depends on program, budget, seed and effort only, never on the clock, unless it is interrupted. Moves
differ in price by orders of magnitude (a rerun chain through a recurrent layer is hundreds of runs), so besides moves
the runs that are walked are limited (``IntervalState.allow_work``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ebbtide.planners.base import Interrupt
from ebbtide.planners.search import annealing as _annealing
from ebbtide.planners.search import layout as L
from ebbtide.planners.search import moves as _moves
from ebbtide.planners.search import timing as _timing
from ebbtide.planners.search.draws import random_state
from ebbtide.planners.search.interval_state import NO_LIMIT, IntervalState

__all__ = ["DESCENT", "anneal", "clean_up", "descend", "in_chunks", "repair", "tighten"]

CHUNK_SECONDS = 0.03
HOT = 0.002  # first temperature as a share of the unplanned step: about the cost of one op in a 500-op step
STEPS_PER_OP = 20  # evictions after which a repair is given up: each op is rerun a few times at the deepest budgets
NOTHING_DROPPED, NEVER_DROPPED = 0, -1
"""Stamps of a repair that follows no move. By the first, offers have their prices. By the second, which is what rows
begin with, offers of what no move has ever dropped have a thousand times that: the first that gains anything is taken.
Without tiers repairs have always been made so; plans rest on it."""
TIGHTEN = 20  # rounds at most; each gains something or is the last
DESCENT = (0.12, 0.03, 0.01, 0.003)  # share of the peak taken off at once; the next smaller one when that fails
DESCENT_MOVES, STUCK_MOVES = 50, 150  # annealing moves after each step down, and before another try
DESCENT_TRIES = 3


def in_chunks(total: int, interrupt: Interrupt, *, begin: int = 16, least: int = 4) -> Iterator[tuple[int, int]]:
    """Ranges ``(first, last)`` that make up ``0..total-1``, each of as many as took 30 ms so far.

    Args:
        total: how many there are.
        interrupt: looked at before each range; it ends them.
        begin: length of the first range.
        least: of any but the last.
    """
    first, chunk = 0, begin
    while first < total and not interrupt:
        start, last = time.perf_counter(), min(first + chunk, total)
        yield first, last
        first, seconds = last, time.perf_counter() - start
        chunk = max(least, min(2 * chunk, int(chunk * CHUNK_SECONDS / max(seconds, 1e-6))))


def repair(
    state: IntervalState,
    budget: int,
    interrupt: Interrupt,
    *,
    share: float = 0.0,
    lane: float = 0.5,
    moves_only: bool = False,
) -> bool:
    """Rerun or move until every stage fits; whether that was reached. The state is kept as far as it came.

    Args:
        state: changed in place.
        budget: bytes above the start.
        interrupt: looked at between chunks.
        share: inputs up to this share of the bytes gained may be held through stages over the budget.
        lane: price of a lane's time where reruns need inputs that may be loaded.
        moves_only: rerun nothing.
    """
    memory = state.memory
    memory[L.H_MOVES_ONLY] = moves_only
    stamp = NOTHING_DROPPED if memory[L.H_TIERS] else NEVER_DROPPED
    for first, last in in_chunks(STEPS_PER_OP * state.stages, interrupt):
        done = _moves.repair(memory, budget, 0.0, 1.0, share, NO_LIMIT, lane, stamp, last - first, 1)
        state.commit()
        if done != _moves.UNFINISHED:
            break
    memory[L.H_MOVES_ONLY] = 0
    return state.peak_bytes <= budget


def clean_up(state: IntervalState, budget: int) -> None:
    """Drop every rerun and load without which everything still fits and takes no longer."""
    while _annealing.clean_up(state.memory, budget):
        pass


def tighten(state: IntervalState, budget: int) -> None:
    """Time loads and holds as well as the budget allows."""
    _timing.tighten(state.memory, budget, TIGHTEN)
    state.commit()


def anneal(
    state: IntervalState,
    budget: int,
    moves: int,
    seed: int,
    interrupt: Interrupt,
    *,
    hot: float = HOT,
    enough: float = 0.0,
    moves_only: bool = False,
    tell: Callable[[float], None] | None = None,
) -> None:
    """Ruin and repair from a state that fits; the state is left at the best found.

    Args:
        state: changed in place; must fit ``budget``.
        budget: bytes above the start.
        moves: how many to try.
        seed: of the random choices.
        interrupt: looked at between chunks.
        hot: first temperature as a share of the unplanned step.
        enough: overhead at which to stop, such as a proven bound.
        moves_only: rerun nothing.
        tell: called with the best overhead after each chunk.
    """
    memory = state.memory
    assert state.peak_bytes <= budget
    memory[L.H_MOVES_ONLY] = moves_only
    memory[L.H_RANDOM] = random_state(seed)
    _annealing.keep_best(memory)
    for first, last in in_chunks(moves, interrupt):
        if state.exhausted or int(memory[L.H_BEST_COST]) <= enough * state.base_cost:
            break
        _annealing.anneal(memory, budget, first, last, moves, hot * state.base_cost)
        if tell is not None:
            tell(int(memory[L.H_BEST_COST]) / state.base_cost)
    memory[L.H_MOVES_ONLY] = 0
    if state.cost != int(memory[L.H_BEST_COST]) or state.peak_bytes > budget:
        state.load_best()


def descend(
    state: IntervalState,
    target: int,
    seed: int,
    interrupt: Interrupt,
    *,
    moves: int,
    tell: Callable[[int], None] | None = None,
) -> bool:
    """Lower the peak a few percent at a time from a state that fits its own peak; whether ``target`` was reached.

    From a plan that fits, each step has little to repair, so this reaches far lower peaks than repairing at the
    target at once.

    Args:
        state: changed in place; left at the lowest peak reached.
        target: bytes above the start.
        seed: of the random choices.
        interrupt: looked at between steps.
        moves: annealing moves in all.
        tell: called with the peak after each step down, bytes above the start.
    """
    level, tries, left = 0, 0, moves
    while state.peak_bytes > target and not interrupt and not state.exhausted:
        peak = state.peak_bytes
        goal = max(target, int(peak * (1.0 - DESCENT[level])))
        before = state.reruns
        if repair(state, goal, interrupt) or repair(state, goal, interrupt, share=0.6):
            clean_up(state, goal)
            level, tries = max(level - 1, 0), 0
            if tell is not None:
                tell(state.peak_bytes)
            spend = min(DESCENT_MOVES, left)
            anneal(state, goal, spend, seed + left, interrupt)
            left -= spend
            continue
        state.load(before)
        tries += 1
        if left <= 0 or tries > DESCENT_TRIES:
            level, tries = level + 1, 0
            if level == len(DESCENT):
                return False
        spend = min(STUCK_MOVES, left)
        anneal(state, peak, spend, seed + left, interrupt, hot=5 * HOT)
        left -= spend
    return state.peak_bytes <= target
