"""Interruptible searches on an interval state: repair to a budget, clean up, anneal, descend.

Compiled moves run in chunks of some 30 ms, between which the interrupt is looked at and progress is told. What a
search does depends on program, budget, seed and effort only, never on the clock, unless it is interrupted. Moves
differ in price by orders of magnitude (a rerun chain through a recurrent layer is hundreds of runs), so besides moves
the runs that are walked are limited (``IntervalState.allow_work``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ebbtide.planners.base import Interrupt
from ebbtide.planners.search import interval_kernels as _runs
from ebbtide.planners.search import layout as L
from ebbtide.planners.search import moves as _moves
from ebbtide.planners.search.interval_state import NO_LIMIT, IntervalState

__all__ = ["anneal", "clean_up", "descend", "repair"]

CHUNK_SECONDS = 0.03
HOT = 0.002  # first temperature as a share of the unplanned step: about the cost of one op in a 500-op step
STEPS_PER_OP = 20  # evictions after which a repair is given up: each op is rerun a few times at the deepest budgets
DESCENT = (0.12, 0.03, 0.01, 0.003)  # share of the peak taken off at once; the next smaller one when that fails
DESCENT_MOVES, STUCK_MOVES = 50, 150  # annealing moves after each step down, and before another try
DESCENT_TRIES = 3


def repair(state: IntervalState, budget: int, interrupt: Interrupt, *, share: float = 0.0) -> bool:
    """Add reruns until every stage fits; whether that was reached. The state is kept as far as it came.

    Args:
        state: changed in place.
        budget: bytes above the start.
        interrupt: looked at between chunks.
        share: inputs up to this share of the bytes gained may be held through stages over the budget.
    """
    steps = STEPS_PER_OP * state.stages
    chunk = 16
    while steps > 0 and not interrupt:
        begin = time.perf_counter()
        done = _moves.repair(state.memory, budget, 0.0, 1.0, share, NO_LIMIT, -1, min(chunk, steps), 1)
        state.commit()
        if done != _moves.UNFINISHED:
            return done == _moves.DONE
        steps -= chunk
        if time.perf_counter() - begin < CHUNK_SECONDS / 2:
            chunk *= 2
    return state.peak_bytes <= budget


def clean_up(state: IntervalState, budget: int) -> None:
    """Cancel every rerun without which everything still fits."""
    while _moves.clean_up(state.memory, budget):
        pass


def anneal(
    state: IntervalState,
    budget: int,
    moves: int,
    seed: int,
    interrupt: Interrupt,
    *,
    hot: float = HOT,
    enough: float = 0.0,
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
        tell: called with the best overhead after each chunk.
    """
    memory = state.memory
    assert state.peak_bytes <= budget
    # xorshift needs a state other than 0; a large odd multiplier spreads small seeds (Knuth's golden ratio).
    memory[L.H_RANDOM] = ((seed + 1) * 0x9E3779B97F4A7C15 & 0x7FFFFFFFFFFFFFFF) | 1
    _runs.save_best(memory)
    first, chunk = 0, 16
    while first < moves and not interrupt and not state.exhausted and memory[L.H_RERUNS] > 0:
        if int(memory[L.H_BEST_COST]) <= enough * state.base_cost:
            break
        begin = time.perf_counter()
        last = min(first + chunk, moves)
        _moves.anneal(memory, budget, first, last, moves, hot * state.base_cost)
        first = last
        seconds = time.perf_counter() - begin
        chunk = max(4, min(2 * chunk, int(chunk * CHUNK_SECONDS / max(seconds, 1e-6))))
        if tell is not None:
            tell(int(memory[L.H_BEST_COST]) / state.base_cost)
    if int(memory[L.H_COST]) != int(memory[L.H_BEST_COST]) or state.peak_bytes > budget:
        state.load(state.best_reruns())


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
