"""Annealing of reruns, loads and holds by makespan, compiled.

1. *Tighten*: every load as late as its lane allows while nothing waits for it, every hold until its copy is written,
   both as far as the budget has room. Loads are timed backwards from what reads them, one after the other on a lane;
   one that is issued before the boundary and read after it is to arrive at the boundary, which waits for it.
2. *Anneal*: drop a few reruns and loads, insert one, or put a load in a rerun's place or the other way round; repair
   with noise, clean up around, tighten; keep by Metropolis' rule on the makespan, else undo.
3. *Exchange* pair by pair: for every rerun and every load, loads in the place of the one and a rerun in that of the
   other; for a row with itself, only that. Where lanes are full, this is what chance seldom hits.
"""

from __future__ import annotations

import math

from ebbtide.planners.hybrid.clock import makespan
from ebbtide.planners.hybrid.moves import DONE, NOTHING, drop, evict_load, is_read, make, repair
from ebbtide.planners.search.interval_kernels import (
    add_load,
    hold,
    made_around,
    reads_around,
    remove_load,
    runs_around,
    save_best,
    undo,
)
from ebbtide.planners.search.jit import Words, apart, inner
from ebbtide.planners.search.layout import (
    B_BYTES,
    B_COLUMNS,
    B_COPIED,
    B_FORBID,
    B_HOLD,
    B_IN,
    B_IN_LANE,
    B_LOADS,
    B_PINNED,
    B_PRODUCER,
    B_STALL,
    B_TIER,
    C_COLUMNS,
    C_NOW,
    H_BASE,
    H_BEST_COST,
    H_BOUNDARY,
    H_BUFFERS,
    H_BUFFERS_END,
    H_CLOCKS,
    H_COST,
    H_HIGH,
    H_JOURNAL,
    H_LOADS,
    H_MOVES_ONLY,
    H_NEEDS,
    H_NODES,
    H_OFFERS_AT,
    H_OPS,
    H_RERUNS,
    H_TOP,
    H_WORK,
    H_WORK_LIMIT,
    N_COLUMNS,
    N_NEXT,
    N_OP,
    N_STAGE,
    OP_COST,
    OP_FORBID,
    OP_IN,
    OP_IN_END,
    OP_LIMIT,
    OP_OUT,
    OP_OUT_END,
    at,
)
from ebbtide.planners.search.moves import draw
from ebbtide.planners.search.segment_tree import max_range, value

__all__ = ["anneal_moves", "clean_up", "exchange", "tighten"]

STEPS = 60
RUIN = 20
INSERT, INSERT_LOAD, SWAP = 0.05, 0.1, 0.1  # shares of moves that begin so; the others drop a few rows first
ALSO = 0.7  # of the swaps, with another one the other way round: a lane that is full takes nothing more
DEAR = 8
ROUNDS = 2
FEW = 8  # evictions to repair an exchange
MINUS = -1


@apart
def shift_loads(m: Words, budget: int) -> bool:
    """The loads of clause 1 by the clocks as last walked; false if the journal is full."""
    n, clocks, needs, late, boundary = m[H_OPS], m[H_CLOCKS], m[H_NEEDS], m[H_OFFERS_AT], m[H_BOUNDARY]
    for u in range(n + 1):
        m[needs + u] = -1
    for k in range(C_COLUMNS):
        m[late + k] = m[clocks + n * C_COLUMNS + C_NOW]
    for v in range(m[H_NODES], m[H_HIGH], N_COLUMNS):
        if m[v + N_OP] < -1:
            _, u = reads_around(m, -m[v + N_OP], m[v + N_STAGE] - 1)
            u = min(u, n)
            m[v + N_NEXT] = m[needs + u]
            m[needs + u] = v
    for u in range(n - 1, -1, -1):
        v = m[needs + u]
        while v >= 0:
            following = m[v + N_NEXT]
            b, t = -m[v + N_OP], m[v + N_STAGE]
            lane = late + m[b + B_IN_LANE]
            begin = min(m[clocks + u * C_COLUMNS + C_NOW], m[lane]) - m[b + B_IN]
            made, _ = made_around(m, b, t - 1)
            last, _ = reads_around(m, b, t - 1)
            least = max(made, last) + 1
            stage = u
            while stage > least and m[clocks + stage * C_COLUMNS + C_NOW] > begin:
                stage -= 1
                if stage + 1 == boundary:
                    begin = min(begin, m[clocks + boundary * C_COLUMNS + C_NOW] - m[b + B_IN])
            m[lane] = begin
            if stage < t and max_range(m, stage, t - 1) + m[b + B_BYTES] > budget:
                earliest, stage = stage, t
                while stage > earliest and value(m, stage - 1) + m[b + B_BYTES] <= budget:
                    stage -= 1
            if stage != t and not (remove_load(m, b, t) and add_load(m, b, stage)):
                return False
            v = following
    return True


@apart
def shift_holds(m: Words, budget: int) -> bool:
    """The holds of clause 1 by the clocks as last walked; false if the journal is full."""
    clocks, size = m[H_CLOCKS], int(NOTHING)
    for b in range(m[H_BUFFERS], m[H_BUFFERS_END], B_COLUMNS):
        if m[b + B_LOADS] < 0:
            continue
        size = m[b + B_BYTES]
        p = m[b + B_PRODUCER]
        _, q = made_around(m, b, p)
        last, _ = reads_around(m, b, q - 1)
        end = max(p, last)
        now = m[b + B_HOLD] if end < m[b + B_HOLD] < q else end
        copied, stall = m[b + B_COPIED], m[b + B_STALL]
        s = end
        while s + 1 < q and m[clocks + (s + 1) * C_COLUMNS + C_NOW] - (stall if s >= now else 0) < copied:
            s += 1
        if s > now and max_range(m, now + 1, s) + size > budget:
            latest, s = s, now
            while s < latest and value(m, s + 1) + size <= budget:
                s += 1
        if s != now or m[b + B_HOLD] != (s if s > end else -1):
            if not hold(m, b, s if s > end else int(MINUS)):
                return False
    return True


@apart
def tighten(m: Words, budget: int, rounds: int) -> None:
    """Clause 1; what makes nothing better is undone."""
    if m[H_LOADS] == 0:
        return
    for _ in range(rounds):
        before = makespan(m)
        mark = m[H_JOURNAL]
        fine = shift_holds(m, budget) and shift_loads(m, budget)
        after = makespan(m)
        if not fine or after > before or m[m[H_TOP] + 1] > budget:
            undo(m, mark)
            return
        if after == before:
            return


@apart
def try_drop(m: Words, v: int, budget: int, before: int) -> int:
    """Drop what is in row ``v`` if everything still fits and the step takes no longer than ``before``; what it takes.

    -1 if it was not done.
    """
    mark = m[H_JOURNAL]
    if drop(m, m[v + N_OP], m[v + N_STAGE]) and m[m[H_TOP] + 1] <= budget:
        after = makespan(m)
        if after <= before:
            return after
    undo(m, mark)
    return -1


@apart
def looks_needless(m: Words, v: int, budget: int) -> bool:
    """Whether what is in row ``v`` made anew could be held instead, but for what its run holds itself."""
    what, t = m[v + N_OP], m[v + N_STAGE]
    if what < 0:
        made, _ = made_around(m, -what, t - 1)
        last, _ = reads_around(m, -what, t - 1)
        return max_range(m, max(made, last) + 1, t - 1) + m[B_BYTES - what] <= budget
    row = at(what)
    room = budget
    for i in range(m[row + OP_IN], m[row + OP_IN_END]):
        if m[m[i] + B_PINNED] == 0:
            room += m[m[i] + B_BYTES]
    for i in range(m[row + OP_OUT], m[row + OP_OUT_END]):
        b = m[i]
        if m[b + B_PINNED] == 0:
            _, q = made_around(m, b, t)
            if is_read(m, b, t, q):
                made, _ = made_around(m, b, t - 1)
                last, _ = reads_around(m, b, t - 1)
                if max_range(m, max(made, last) + 1, t - 1) + m[b + B_BYTES] > room:
                    return False
    return True


@apart
def sweep(m: Words, budget: int) -> None:
    """Try to drop every row that looks needless, from a random one on."""
    rows = (m[H_HIGH] - m[H_NODES]) // N_COLUMNS
    first = int(draw(m) * rows)
    known = makespan(m)
    for k in range(rows):
        v = m[H_NODES] + (first + k) % rows * N_COLUMNS
        if m[v + N_OP] != -1 and looks_needless(m, v, budget):
            after = try_drop(m, v, budget, known)
            known = after if after >= 0 else known


@apart
def clean_up(m: Words, budget: int) -> int:
    """Try to drop every row once; how many were dropped. Final: the journal is emptied."""
    done, known = int(NOTHING), makespan(m)
    for v in range(m[H_HIGH] - N_COLUMNS, m[H_NODES] - 1, -N_COLUMNS):
        if m[v + N_OP] != -1:
            m[H_JOURNAL] = 0
            after = try_drop(m, v, budget, known)
            if after >= 0:
                done += 1
                known = after
    m[H_JOURNAL] = 0
    return done


@inner
def pick_row(m: Words) -> int:
    """The row of a random rerun or load; -1 if there is none."""
    rows = (m[H_HIGH] - m[H_NODES]) // N_COLUMNS
    if m[H_RERUNS] + m[H_LOADS] == 0:
        return -1
    for _ in range(64):
        v = m[H_NODES] + int(draw(m) * rows) * N_COLUMNS
        if m[v + N_OP] != -1:
            return v
    return -1


@inner
def op_of(m: Words, v: int) -> int:
    """The op of a rerun, the producer of what is loaded."""
    o = m[v + N_OP]
    return o if o >= 0 else m[B_PRODUCER - o]


@inner
def near_row(m: Words, o: int, t: int, window: int) -> int:
    """The row of a random rerun or load whose op or stage lies near; -1 if none was hit."""
    for _ in range(24):
        v = pick_row(m)
        if v >= 0 and (abs(op_of(m, v) - o) <= window or abs(m[v + N_STAGE] - t) <= window // 4):
            return v
    return -1


@apart
def ruin_rows(m: Words, stamp: int) -> bool:
    """Drop a few random rows, or those of one neighbourhood; false if there are none."""
    v = pick_row(m)
    if v < 0:
        return False
    o, t = op_of(m, v), m[v + N_STAGE]
    kind = draw(m)
    count = 1 + int(draw(m) * draw(m) * RUIN)
    window = 4 + int(draw(m) * 60)
    for _ in range(count):
        each = m[v + N_OP]
        if draw(m) < 0.8:
            if each >= 0:
                m[at(each) + OP_FORBID] = stamp
            else:
                m[B_FORBID - each] = stamp
        if not drop(m, each, m[v + N_STAGE]):
            return False
        v = pick_row(m) if kind < 0.3 else near_row(m, o, t, window)
        if v < 0:
            break
    return True


@apart
def insert_run(m: Words, budget: int, lane: float) -> bool:
    """Rerun a random op for a later use of its outputs; false if that is impossible."""
    n = m[H_OPS]
    o = int(draw(m) * n)
    t = o + int(draw(m) * (n - o))
    _, q = runs_around(m, o, t)
    use = q
    row = at(o)
    for i in range(m[row + OP_OUT], m[row + OP_OUT_END]):
        b = m[i]
        if m[b + B_PINNED] == 0:
            _, after = reads_around(m, b, t)
            use = min(use, after)
    if use >= q or use > m[row + OP_LIMIT]:
        return False
    return make(m, o, use, budget, int(NOTHING), m[H_COST] + int(DEAR) * m[row + OP_COST], lane)


@apart
def insert_load(m: Words, budget: int) -> bool:
    """Load a random buffer for a later use; false if that is impossible."""
    count = (m[H_BUFFERS_END] - m[H_BUFFERS]) // B_COLUMNS
    for _ in range(16):
        b = m[H_BUFFERS] + int(draw(m) * count) * B_COLUMNS
        if m[b + B_TIER] < 0:
            continue
        p = m[b + B_PRODUCER]
        t = p + 1 + int(draw(m) * (m[H_OPS] - p - 1))
        _, q = made_around(m, b, t)
        last, use = reads_around(m, b, t)
        if use < q and last < t:
            return evict_load(m, b, use, t, budget)
    return False


@apart
def swap(m: Words, v: int, budget: int, lane: float) -> bool:
    """Put loads in the place of the rerun in row ``v``, or a rerun in that of a load; false if that is impossible."""
    o, t = m[v + N_OP], m[v + N_STAGE]
    if o < 0:
        b = -o
        _, use = reads_around(m, b, t - 1)
        if m[H_MOVES_ONLY] == 1 or not drop(m, o, t):
            return False
        o = m[b + B_PRODUCER]
        if use > m[at(o) + OP_LIMIT]:
            return False
        return make(m, o, use, budget, int(NOTHING), m[H_COST] + int(DEAR) * m[at(o) + OP_COST], lane)
    if not drop(m, o, t):
        return False
    done = False
    row = at(o)
    for i in range(m[row + OP_OUT], m[row + OP_OUT_END]):
        b = m[i]
        if m[b + B_PINNED] == 0 and m[b + B_TIER] >= 0:
            made, q = made_around(m, b, t - 1)
            last, use = reads_around(m, b, t - 1)
            end = max(made, last)
            if use < q and end + 1 < use:
                done = evict_load(m, b, use, end + 1, budget) or done
    return done


@apart
def swap_pair(m: Words, budget: int, lane: float) -> bool:
    """Swap a random row, and mostly one of the other kind as well; false if the first is impossible."""
    v = pick_row(m)
    if v < 0:
        return False
    is_load = m[v + N_OP] < 0
    if not swap(m, v, budget, lane):
        return False
    if draw(m) < ALSO:
        for _ in range(8):
            v = pick_row(m)
            if v >= 0 and (m[v + N_OP] < 0) != is_load:
                return swap(m, v, budget, lane)
    return True


@apart
def exchange(m: Words, budget: int, first: int, last: int) -> int:
    """Pairs ``first..last-1`` of clause 3; how many made the step shorter. Each that does is final."""
    rows = (m[H_HIGH] - m[H_NODES]) // N_COLUMNS
    done = int(NOTHING)
    for pair in range(first, min(last, rows * rows)):
        v, w = m[H_NODES] + pair // rows * N_COLUMNS, m[H_NODES] + pair % rows * N_COLUMNS
        what, other = m[v + N_OP], m[w + N_OP]
        if what == -1 or other == -1 or (v != w and (what < 0 or other >= 0)) or m[H_WORK] > m[H_WORK_LIMIT]:
            continue
        m[H_JOURNAL] = 0
        before = makespan(m)
        stage = m[w + N_STAGE]
        fine = swap(m, v, budget, 1.0)
        if fine and v != w and m[w + N_OP] == other and m[w + N_STAGE] == stage:
            fine = swap(m, w, budget, 1.0)
        if fine and m[m[H_TOP] + 1] > budget:
            fine = (
                repair(m, budget, 0.0, 1.0, 0.0, before - m[H_BASE], 1.0, int(NOTHING), int(FEW), int(NOTHING)) == DONE
            )
        if fine and m[H_COST] < before:
            sweep(m, budget)
            tighten(m, budget, int(ROUNDS))
        if fine and makespan(m) < before:
            done += 1
        else:
            undo(m, int(NOTHING))
    m[H_JOURNAL] = 0
    return done


@apart
def anneal_moves(m: Words, budget: int, first: int, last: int, total: int, hot: float) -> None:
    """Moves ``first..last-1`` of ``total`` (clause 2); the best is kept in the place of the best."""
    for move in range(first, last):
        if m[H_WORK] > m[H_WORK_LIMIT]:
            break
        m[H_JOURNAL] = 0
        cost = makespan(m)
        heat = hot * (1.0 - move / total)
        limit = cost + int(-heat * math.log(1.0 - draw(m)))
        stamp = move + 1
        kind = draw(m)
        lane = 2.0 * draw(m) * draw(m)
        reruns = m[H_MOVES_ONLY] == 0
        if kind < INSERT and reruns:
            fine = insert_run(m, budget, lane)
        elif kind < INSERT + INSERT_LOAD:
            fine = insert_load(m, budget)
        elif kind < INSERT + INSERT_LOAD + SWAP and reruns:
            fine = swap_pair(m, budget, lane)
        else:
            fine = ruin_rows(m, stamp)
        share = 0.6 if draw(m) < 0.3 else 0.0
        noise = 0.9 * draw(m)
        if fine:
            slack = limit + max((limit - makespan(m)) // 2, 0) - m[H_BASE]
            fine = repair(m, budget, noise, draw(m), share, slack, lane, stamp, int(STEPS), int(NOTHING)) == DONE
        if fine:
            sweep(m, budget)
            tighten(m, budget, int(ROUNDS))
        if fine and makespan(m) <= limit:
            if makespan(m) < m[H_BEST_COST]:
                save_best(m)
                m[H_BEST_COST] = makespan(m)
        else:
            undo(m, int(NOTHING))
    m[H_JOURNAL] = 0
