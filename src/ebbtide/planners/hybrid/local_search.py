"""Interruptible searches on the hybrid state: repair to a budget, clean up, tighten, anneal.

As ``search.local_search``, with the makespan in the place of the cost of reruns.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ebbtide.planners.base import Interrupt
from ebbtide.planners.hybrid import anneal as _anneal
from ebbtide.planners.hybrid import clock as _clock
from ebbtide.planners.hybrid import moves as _moves
from ebbtide.planners.hybrid.state import HybridState
from ebbtide.planners.search import interval_kernels as _runs
from ebbtide.planners.search import layout as L
from ebbtide.planners.search.interval_state import NO_LIMIT
from ebbtide.planners.search.local_search import CHUNK_SECONDS, HOT, STEPS_PER_OP

__all__ = ["anneal", "clean_up", "exchange", "repair", "tighten"]

TIGHTEN = 20  # rounds at most; each gains something or is the last


def repair(
    state: HybridState,
    budget: int,
    interrupt: Interrupt,
    *,
    share: float = 0.0,
    lane: float = 0.5,
    moves_only: bool = False,
) -> bool:
    """Move or rerun until every stage fits; whether that was reached. The state is kept as far as it came.

    Args:
        state: changed in place.
        budget: bytes above the start.
        interrupt: looked at between chunks.
        share: as in ``search.local_search``.
        lane: price of a lane's time where reruns need inputs that may be loaded.
        moves_only: rerun nothing.
    """
    state.memory[L.H_MOVES_ONLY] = moves_only
    steps = STEPS_PER_OP * state.stages
    chunk, done = 16, _moves.UNFINISHED
    while steps > 0 and not interrupt and done == _moves.UNFINISHED:
        begin = time.perf_counter()
        done = _moves.repair(state.memory, budget, 0.0, 1.0, share, NO_LIMIT, lane, 0, min(chunk, steps), 1)
        state.commit()
        steps -= chunk
        if time.perf_counter() - begin < CHUNK_SECONDS / 2:
            chunk *= 2
    state.memory[L.H_MOVES_ONLY] = 0
    return state.peak_bytes <= budget


def clean_up(state: HybridState, budget: int) -> None:
    """Drop every rerun and load without which everything still fits and takes no longer."""
    while _anneal.clean_up(state.memory, budget):
        pass


def exchange(state: HybridState, budget: int, interrupt: Interrupt) -> None:
    """Exchange reruns and loads pair by pair until none makes the step shorter."""
    found = True
    while found and not interrupt and not state.exhausted:
        rows = (int(state.memory[L.H_HIGH]) - int(state.memory[L.H_NODES])) // L.N_COLUMNS
        found, first, chunk = False, 0, 16
        while first < rows * rows and not interrupt:
            begin = time.perf_counter()
            found = bool(_anneal.exchange(state.memory, budget, first, first + chunk)) or found
            first += chunk
            if time.perf_counter() - begin < CHUNK_SECONDS / 2:
                chunk *= 2


def tighten(state: HybridState, budget: int) -> None:
    """Time loads and holds as well as the budget allows."""
    _anneal.tighten(state.memory, budget, TIGHTEN)
    state.commit()


def anneal(
    state: HybridState,
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
    memory[L.H_RANDOM] = ((seed + 1) * 0x9E3779B97F4A7C15 & 0x7FFFFFFFFFFFFFFF) | 1
    _runs.save_best(memory)
    memory[L.H_BEST_COST] = _clock.makespan(memory)
    first, chunk = 0, 16
    while first < moves and not interrupt and not state.exhausted:
        best = int(memory[L.H_BEST_COST]) / state.base_cost - 1.0
        if tell is not None:
            tell(best)
        if best <= enough:
            break
        begin = time.perf_counter()
        last = min(first + chunk, moves)
        _anneal.anneal_moves(memory, budget, first, last, moves, hot * state.base_cost)
        first = last
        seconds = time.perf_counter() - begin
        chunk = max(4, min(2 * chunk, int(chunk * CHUNK_SECONDS / max(seconds, 1e-6))))
    memory[L.H_MOVES_ONLY] = 0
    if _clock.makespan(memory) != int(memory[L.H_BEST_COST]) or state.peak_bytes > budget:
        state.load_choice(state.best_choice())
