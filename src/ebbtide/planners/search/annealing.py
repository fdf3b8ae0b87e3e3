"""Annealing on the interval state, and cleaning up, compiled: one loop, by the objective that the state has.

1. A *move* drops a few reruns and loads, or first inserts one, or retimes a rerun; where there are tiers it may put a
   load in a rerun's place, or the other way round, as well. The state is repaired with noise, and *tidied*: what has
   become needless is dropped, and loads and holds are timed (``timing``).
2. It is kept by Metropolis' rule on the objective, else undone. With ``H_EARLY`` set, reruns may stand before the stage
   of their next use: held until then, their outputs can cost less than what the rerun's inputs would have held
   (docs/adr/0012).
3. Shares of the kinds of moves, and how much is dropped and tidied, differ with tiers: there a row of either kind may
   take the other's place, and one dropped alone mostly comes back as it was.
"""

from __future__ import annotations

import math

from ebbtide.planners.search import layout as L
from ebbtide.planners.search.clock import objective
from ebbtide.planners.search.draws import draw
from ebbtide.planners.search.interval_kernels import made_around, reads_around, runs_around, save_best, undo
from ebbtide.planners.search.jit import Words, apart, inner
from ebbtide.planners.search.layout import at
from ebbtide.planners.search.moves import DONE, drop, early, evict_load, is_read, make, repair
from ebbtide.planners.search.segment_tree import max_range
from ebbtide.planners.search.timing import tighten

__all__ = ["anneal", "clean_up", "keep_best"]

NOTHING = 0  # passed as int(NOTHING): numba would compile a function anew for each literal argument
STEPS = 60  # evictions after which the repair of one move is given up
RUIN, RUIN_TIERED = 8, 20  # rows dropped by one move at most
CLEAN = 6  # drops tried after each move; where there are tiers, every row that looks needless
ROUNDS = 2  # of timing loads and holds after each move
INSERT, RETIME = 0.15, 0.15  # shares of moves that begin so; the others drop a few rows first
INSERT_TIERED, INSERT_LOAD, SWAP = 0.05, 0.1, 0.1  # likewise where there are tiers
ALSO = 0.7  # of the swaps, with another one the other way round: a lane that is full takes nothing more
DEAR = 8  # times the op's own cost: what an inserted or retimed rerun may add with all that it needs
INSERT_EARLY = 0.5  # of the inserted reruns stand at a random stage before the next use
RETIME_ANYWHERE = 0.25  # of the retimed reruns go to a random stage, not to where their inputs live anyway


@apart
def keep_best(m: Words) -> None:
    """Save the state as the best, with its objective."""
    save_best(m)
    m[L.H_BEST_COST] = objective(m)


@apart
def try_drop(m: Words, v: int, budget: int, before: int) -> int:
    """Drop what is in row ``v`` if everything still fits and the objective stays within ``before``; the new one.

    -1 if it was not done.
    """
    mark = m[L.H_JOURNAL]
    if drop(m, m[v + L.N_OP], m[v + L.N_STAGE]) and m[m[L.H_TOP] + 1] <= budget:
        after = objective(m)
        if after <= before:
            return after
    undo(m, mark)
    return -1


@apart
def looks_needless(m: Words, v: int, budget: int) -> bool:
    """Whether what is in row ``v`` made anew could be held instead, but for what its run holds itself."""
    what, t = m[v + L.N_OP], m[v + L.N_STAGE]
    if what < 0:
        made, _ = made_around(m, -what, t - 1)
        last, _ = reads_around(m, -what, t - 1)
        return max_range(m, max(made, last) + 1, t - 1) + m[L.B_BYTES - what] <= budget
    row = at(what)
    room = budget
    for i in range(m[row + L.OP_IN], m[row + L.OP_IN_END]):
        if m[m[i] + L.B_PINNED] == 0:
            room += m[m[i] + L.B_BYTES]
    for i in range(m[row + L.OP_OUT], m[row + L.OP_OUT_END]):
        b = m[i]
        if m[b + L.B_PINNED] == 0:
            _, q = made_around(m, b, t)
            if is_read(m, b, t, q):
                made, _ = made_around(m, b, t - 1)
                last, _ = reads_around(m, b, t - 1)
                if max_range(m, max(made, last) + 1, t - 1) + m[b + L.B_BYTES] > room:
                    return False
    return True


@apart
def sweep(m: Words, budget: int) -> None:
    """Try to drop every row that looks needless, from a random one on."""
    rows = (m[L.H_HIGH] - m[L.H_NODES]) // L.N_COLUMNS
    first = int(draw(m) * rows)
    known = objective(m)
    for k in range(rows):
        v = m[L.H_NODES] + (first + k) % rows * L.N_COLUMNS
        if m[v + L.N_OP] != -1 and looks_needless(m, v, budget):
            after = try_drop(m, v, budget, known)
            known = after if after >= 0 else known


@apart
def clean_up(m: Words, budget: int) -> int:
    """Try to drop every row once; how many were dropped. Final: the journal is emptied."""
    done, known = int(NOTHING), objective(m)
    for v in range(m[L.H_HIGH] - L.N_COLUMNS, m[L.H_NODES] - 1, -L.N_COLUMNS):
        if m[v + L.N_OP] != -1:
            m[L.H_JOURNAL] = 0
            after = try_drop(m, v, budget, known)
            if after >= 0:
                done += 1
                known = after
    m[L.H_JOURNAL] = 0
    return done


@inner
def pick(m: Words) -> int:
    """The row of a random rerun or load; -1 if there is none."""
    rows = (m[L.H_HIGH] - m[L.H_NODES]) // L.N_COLUMNS
    if m[L.H_RERUNS] + m[L.H_LOADS] == 0:
        return -1
    for _ in range(64):
        v = m[L.H_NODES] + int(draw(m) * rows) * L.N_COLUMNS
        if m[v + L.N_OP] != -1:
            return v
    return -1


@inner
def op_of(m: Words, v: int) -> int:
    """The op of a rerun, the producer of what is loaded."""
    o = m[v + L.N_OP]
    return o if o >= 0 else m[L.B_PRODUCER - o]


@inner
def near(m: Words, o: int, t: int, window: int) -> int:
    """The row of a random rerun or load whose op or stage lies near; -1 if none was hit."""
    for _ in range(24):
        v = pick(m)
        if v >= 0 and (abs(op_of(m, v) - o) <= window or abs(m[v + L.N_STAGE] - t) <= window // 4):
            return v
    return -1


@apart
def ruin(m: Words, stamp: int) -> bool:
    """Drop a few random rows, or those of one neighbourhood; false if there are none."""
    v = pick(m)
    if v < 0:
        return False
    o, t = op_of(m, v), m[v + L.N_STAGE]
    kind = draw(m)
    count = 1 + int(draw(m) * draw(m) * (int(RUIN_TIERED) if m[L.H_TIERS] > 0 else int(RUIN)))
    window = 4 + int(draw(m) * 60)
    for _ in range(count):
        each = m[v + L.N_OP]
        if draw(m) < 0.8:
            if each >= 0:
                m[at(each) + L.OP_FORBID] = stamp
            else:
                m[L.B_FORBID - each] = stamp
        if not drop(m, each, m[v + L.N_STAGE]):
            return False
        v = pick(m) if kind < 0.3 else near(m, o, t, window)
        if v < 0:
            break
    return True


@apart
def rerun(m: Words, o: int, t: int, budget: int, lane: float) -> bool:
    """Rerun ``o`` at ``t`` with all it needs, over the budget if need be; false if it may not be or is too dear."""
    return make(m, o, t, budget, int(NOTHING), m[L.H_COST] + int(DEAR) * m[at(o) + L.OP_COST], lane)


@apart
def insert(m: Words, budget: int, lane: float) -> bool:
    """Rerun a random op for a later use of its outputs; false if that is impossible."""
    n = m[L.H_OPS]
    o = int(draw(m) * n)
    t = o + int(draw(m) * (n - o))
    _, q = runs_around(m, o, t)
    use = q
    row = at(o)
    for i in range(m[row + L.OP_OUT], m[row + L.OP_OUT_END]):
        b = m[i]
        if m[b + L.B_PINNED] == 0:
            _, after = reads_around(m, b, t)
            use = min(use, after)
    if use >= q or use > m[row + L.OP_LIMIT]:
        return False
    if m[L.H_TIERS] == 0 and draw(m) < INSERT_EARLY * m[L.H_EARLY]:
        use = t + 1 + int(draw(m) * (use - t))
    return rerun(m, o, use, budget, lane)


@apart
def retime(m: Words, budget: int) -> bool:
    """Rerun a random rerun's op earlier, where its inputs live anyway or anywhere; false if that is impossible."""
    v = pick(m)
    if v < 0:
        return False
    o, t = m[v + L.N_OP], m[v + L.N_STAGE]
    if not drop(m, o, t):
        return False
    made, _ = runs_around(m, o, t)
    u = early(m, o, made, t)
    if u == t or draw(m) < RETIME_ANYWHERE:
        u = made + 1 + int(draw(m) * (t - made))
    return rerun(m, o, u, budget, 0.0)


@apart
def insert_load(m: Words, budget: int) -> bool:
    """Load a random buffer for a later use; false if that is impossible."""
    count = (m[L.H_BUFFERS_END] - m[L.H_BUFFERS]) // L.B_COLUMNS
    for _ in range(16):
        b = m[L.H_BUFFERS] + int(draw(m) * count) * L.B_COLUMNS
        if m[b + L.B_TIER] < 0:
            continue
        p = m[b + L.B_PRODUCER]
        t = p + 1 + int(draw(m) * (m[L.H_OPS] - p - 1))
        _, q = made_around(m, b, t)
        last, use = reads_around(m, b, t)
        if use < q and last < t:
            return evict_load(m, b, use, t, budget)
    return False


@apart
def swap(m: Words, v: int, budget: int, lane: float) -> bool:
    """Put loads in the place of the rerun in row ``v``, or a rerun in that of a load; false if that is impossible."""
    o, t = m[v + L.N_OP], m[v + L.N_STAGE]
    if o < 0:
        b = -o
        _, use = reads_around(m, b, t - 1)
        if m[L.H_MOVES_ONLY] == 1 or not drop(m, o, t):
            return False
        o = m[b + L.B_PRODUCER]
        return use <= m[at(o) + L.OP_LIMIT] and rerun(m, o, use, budget, lane)
    if not drop(m, o, t):
        return False
    done = False
    row = at(o)
    for i in range(m[row + L.OP_OUT], m[row + L.OP_OUT_END]):
        b = m[i]
        if m[b + L.B_PINNED] == 0 and m[b + L.B_TIER] >= 0:
            made, q = made_around(m, b, t - 1)
            last, use = reads_around(m, b, t - 1)
            end = max(made, last)
            if use < q and end + 1 < use:
                done = evict_load(m, b, use, end + 1, budget) or done
    return done


@apart
def swap_pair(m: Words, budget: int, lane: float) -> bool:
    """Swap a random row, and mostly one of the other kind as well; false if the first is impossible."""
    v = pick(m)
    if v < 0:
        return False
    is_load = m[v + L.N_OP] < 0
    if not swap(m, v, budget, lane):
        return False
    if draw(m) < ALSO:
        for _ in range(8):
            v = pick(m)
            if v >= 0 and (m[v + L.N_OP] < 0) != is_load:
                return swap(m, v, budget, lane)
    return True


@apart
def begin(m: Words, budget: int, kind: float, lane: float, stamp: int) -> bool:
    """Begin the move that the random number ``kind`` stands for (clause 1); false if it is impossible."""
    if m[L.H_TIERS] == 0:
        if kind < INSERT:
            return insert(m, budget, 0.0)
        return retime(m, budget) if kind < INSERT + RETIME * m[L.H_EARLY] else ruin(m, stamp)
    reruns = m[L.H_MOVES_ONLY] == 0
    if kind < INSERT_TIERED and reruns:
        return insert(m, budget, lane)
    if kind < INSERT_TIERED + INSERT_LOAD:
        return insert_load(m, budget)
    if kind < INSERT_TIERED + INSERT_LOAD + SWAP and reruns:
        return swap_pair(m, budget, lane)
    return ruin(m, stamp)


@apart
def tidy(m: Words, budget: int) -> None:
    """Drop what a move has made needless, and time loads and holds (clause 1)."""
    if m[L.H_TIERS] > 0:
        sweep(m, budget)
        tighten(m, budget, int(ROUNDS))
        return
    for _ in range(CLEAN):
        v = pick(m)
        if v >= 0:
            try_drop(m, v, budget, m[L.H_COST])


@apart
def anneal(m: Words, budget: int, first: int, last: int, total: int, hot: float) -> None:
    """Moves ``first..last-1`` of ``total``; the best is kept in the place of the best.

    ``hot`` is the temperature at the start, in cost; it falls linearly to nothing.
    """
    for move in range(first, last):
        if m[L.H_WORK] > m[L.H_WORK_LIMIT]:
            break
        m[L.H_JOURNAL] = 0
        cost = objective(m)
        heat = hot * (1.0 - move / total)
        limit = cost + int(-heat * math.log(1.0 - draw(m)))
        stamp = move + 1
        kind = draw(m)
        lane = 2.0 * draw(m) * draw(m) if m[L.H_TIERS] > 0 else 0.0
        fine = begin(m, budget, kind, lane, stamp)
        share = 0.6 if draw(m) < 0.3 else 0.0
        noise = 0.9 * draw(m)
        if fine:
            slack = limit + max((limit - objective(m)) // 2, 0)
            fine = repair(m, budget, noise, draw(m), share, slack, lane, stamp, int(STEPS), int(NOTHING)) == DONE
        if fine:
            tidy(m, budget)
        if fine and objective(m) <= limit:
            if objective(m) < m[L.H_BEST_COST]:
                keep_best(m)
        else:
            undo(m, int(NOTHING))
    m[L.H_JOURNAL] = 0
