"""Changes of the interval state that planners are made of, compiled: evict, drop, repair.

There is one set of moves, with loads and without. A program whose buffers may go to no tier has no loads, and its
searches judge by the cost of reruns; where there are tiers (``H_TIERS``), by the makespan (``clock.objective``).

1. *Put* a rerun or a load: what it makes needless goes, loads that nobody reads any more and reruns that served it.
2. *Drop* a rerun or a load: its buffer is held instead, and what only served it goes with it.
3. *Evict* over an idle gap around stage ``t``: rerun right before the next use, with all that it needs: each missing
   input is held longer, loaded, or made again in turn, to any depth (a load needs nothing, so it ends a chain). A rerun
   that already stands later is pulled forward wherever its outputs can be held. Or load in time for the next use, as
   early as the lane needs it, and hold until the copy is written. What is only held, or loaded long before it is
   read, gives way as well: held less long, loaded later.
4. *Repair*: while some stage is over the budget, take the highest, offer its idle gaps by added cost per byte
   gained, and apply the best. Prices of offers are the last measured ones, so an offer is applied to be measured
   and accepted when no other's price undercuts it: a lazy heap with a few live entries. A transfer that hides costs
   :data:`FAINT` of its time, so that large buffers go first. Where a noisy repair places a rerun early, it stands
   before the stage of its next use, where its inputs live anyway (docs/adr/0012); without tiers only.
"""

from __future__ import annotations

from ebbtide.planners.search import layout as L
from ebbtide.planners.search.clock import first_end, objective
from ebbtide.planners.search.draws import draw
from ebbtide.planners.search.interval_kernels import (
    add_load,
    add_run,
    end_of,
    hold,
    is_loaded,
    made_around,
    may_load,
    reads_around,
    remove_load,
    remove_run,
    runs_around,
    undo,
)
from ebbtide.planners.search.jit import Words, apart, inner
from ebbtide.planners.search.layout import at
from ebbtide.planners.search.segment_tree import argmax, max_range, value

__all__ = ["DONE", "UNFINISHED", "drop", "early", "evict_load", "is_read", "make", "repair"]

UNFINISHED, DONE, FAILED = 0, 1, 2  # answers of repair
NOTHING, MINUS = 0, -1  # passed as int(..): numba would compile a function anew for each literal argument
EARLY = 0.3  # of the evictions of a noisy repair place the rerun where its inputs live anyway
FAINT = 0.01
FORBIDDEN = 1e3  # price factor of an eviction that the same move has just dropped
MUCH = 0.3  # noise, beyond which the first offers will do
TURNS = 3  # collections of offers for one eviction: where the first are all dearer than thought, others may be better
PRICE = float(1 << 20)  # prices are kept as integers in units of 1 / PRICE cost per byte


@inner
def is_read(m: Words, b: int, p: int, q: int) -> bool:
    """Whether ``b`` is read in stages ``p..q-1``."""
    last, _ = reads_around(m, b, q - 1)
    return last >= p


@inner
def is_useless(m: Words, o: int, p: int) -> bool:
    """Whether no output of ``o`` made at ``p`` is read before it is made again."""
    row = at(o)
    for i in range(m[row + L.OP_OUT], m[row + L.OP_OUT_END]):
        b = m[i]
        if m[b + L.B_PINNED] == 0:
            _, q = made_around(m, b, p)
            if is_read(m, b, p, q):
                return False
    return True


@apart
def drop(m: Words, what: int, t: int) -> bool:
    """Take away a rerun or, by the negative address of its buffer, a load, and what only served it (clause 2).

    False if the journal is full.
    """
    pending = m[L.H_PENDING_AT]
    m[pending], m[pending + 1] = what, t
    count = 1
    while count > 0:
        count -= 1
        what, t = m[pending + 2 * count], m[pending + 2 * count + 1]
        if what < 0:
            b = -what
            if is_loaded(m, b, t):
                if not remove_load(m, b, t):
                    return False
                if m[b + L.B_LOADS] < 0 and m[b + L.B_HOLD] >= 0 and not hold(m, b, int(MINUS)):
                    return False
            continue
        before, _ = runs_around(m, what, t)
        if before != t:
            continue
        if not remove_run(m, what, t):
            return False
        row = at(what)
        for i in range(m[row + L.OP_IN], m[row + L.OP_IN_END]):
            b = m[i]
            if m[b + L.B_PINNED] == 0 and count < m[L.H_ROOM] - 1:
                producer = m[b + L.B_PRODUCER]
                p, q = made_around(m, b, t)
                if is_loaded(m, b, p):
                    if not is_read(m, b, p, q):
                        m[pending + 2 * count], m[pending + 2 * count + 1] = -b, p
                        count += 1
                elif p > producer and is_useless(m, producer, p):
                    m[pending + 2 * count], m[pending + 2 * count + 1] = producer, p
                    count += 1
    return True


@apart
def drop_served(m: Words, b: int, t: int) -> bool:
    """Take away what a new production of ``b`` at ``t`` makes needless: the one before it, and a hold beyond it."""
    p, _ = made_around(m, b, t - 1)
    if m[b + L.B_HOLD] >= t and not hold(m, b, int(MINUS)):
        return False
    if is_loaded(m, b, p):
        return is_read(m, b, p, t) or drop(m, -b, p)
    if p > m[b + L.B_PRODUCER] and is_useless(m, m[b + L.B_PRODUCER], p):
        return drop(m, m[b + L.B_PRODUCER], p)
    return True


@apart
def put_load(m: Words, b: int, t: int) -> bool:
    """Load ``b`` at ``t`` (clause 1); false if it may not be."""
    return add_load(m, b, t) and drop_served(m, b, t)


@apart
def put_run(m: Words, o: int, t: int) -> bool:
    """Rerun ``o`` at ``t``, in place of loads of its outputs there (clause 1); false if it may not run."""
    row = at(o)
    for i in range(m[row + L.OP_OUT], m[row + L.OP_OUT_END]):
        if m[m[i] + L.B_LOADS] >= 0 and is_loaded(m, m[i], t) and not drop(m, -m[i], t):
            return False
    if not add_run(m, o, t):
        return False
    for i in range(m[row + L.OP_OUT], m[row + L.OP_OUT_END]):
        if m[m[i] + L.B_LOADS] >= 0 and not drop_served(m, m[i], t):
            return False
    return True


@apart
def place(m: Words, b: int, first: int, u: int, budget: int) -> int:
    """The stage from ``first`` to ``u`` to load ``b`` for a read at ``u``: the last one that is in time, or nearly.

    By the clocks as last walked; where more than ``budget`` bytes would be, it is no earlier.
    """
    clocks, lane, boundary, size = m[L.H_CLOCKS], m[b + L.B_IN_LANE], m[L.H_BOUNDARY], m[b + L.B_BYTES]
    deadline = m[clocks + u * L.C_COLUMNS + L.C_NOW]
    best, least = u, -1
    stage = u
    while stage >= first:
        if stage < u and value(m, stage) + size > budget:
            break
        row = clocks + stage * L.C_COLUMNS
        end = max(m[row + L.C_NOW], m[row + lane], m[b + L.B_COPIED] if m[b + L.B_LOADS] >= 0 else 0) + m[b + L.B_IN]
        if stage < boundary <= u:
            deadline = min(deadline, m[clocks + boundary * L.C_COLUMNS + L.C_NOW])
            if end > deadline:
                break
        if least < 0 or end < least:
            best, least = stage, end
        if end <= deadline:
            return stage
        stage -= 1
    return best


@apart
def place_hold(m: Words, b: int, last: int) -> bool:
    """Hold ``b`` until its copy is written by the clocks as last walked, at most until ``last``; false if full."""
    clocks, p = m[L.H_CLOCKS], m[b + L.B_PRODUCER]
    row = clocks + (p + 1) * L.C_COLUMNS
    copied = max(m[row + L.C_NOW], m[row + m[b + L.B_OUT_LANE]]) + m[b + L.B_OUT]
    end = first_end(m, b)
    stage = end
    while stage < last and m[clocks + (stage + 1) * L.C_COLUMNS + L.C_NOW] < copied:
        stage += 1
    return stage == end or hold(m, b, stage)


@apart
def make(m: Words, o: int, t: int, budget: int, small: int, limit: int, lane: float) -> bool:
    """Rerun ``o`` at ``t`` with all it needs (clause 3); false if that is impossible or beyond ``limit``.

    Inputs of up to ``small`` bytes may be held through stages that are over the budget. ``lane`` is the price of a
    lane's time: an input is loaded if that is less than making it again.
    """
    stack = m[L.H_STACK_AT]
    m[stack] = o
    count = 1
    while count > 0:
        count -= 1
        o = m[stack + count]
        before, _ = runs_around(m, o, t)
        if before == t:
            continue
        row = at(o)
        for i in range(m[row + L.OP_IN], m[row + L.OP_IN_END]):
            b = m[i]
            if m[b + L.B_PINNED] == 1:
                continue
            producer = m[b + L.B_PRODUCER]
            p, q = made_around(m, b, t)
            end = end_of(m, b, p, q)
            size = m[b + L.B_BYTES]
            if end >= t or size <= small:
                continue
            if max_range(m, max(end, p + 1), t - 1) + size > budget:
                may_run = t <= m[at(producer) + L.OP_LIMIT] and count + 1 < m[L.H_ROOM]
                if m[b + L.B_TIER] >= 0:
                    moved = m[b + L.B_IN] if m[b + L.B_LOADS] >= 0 else m[b + L.B_IN] + m[b + L.B_OUT]
                    if not may_run or lane * moved < m[at(producer) + L.OP_ESTIMATE]:
                        stage = place(m, b, end + 1, t, budget)
                        if may_load(m, b, stage):
                            if not put_load(m, b, stage):
                                return False
                            continue
                if not may_run:
                    return False
                m[stack + count] = producer
                count += 1
        if not (put_run(m, o, t) if m[L.H_LOADS] > 0 else add_run(m, o, t)) or m[L.H_COST] > limit:
            return False
        _, q = runs_around(m, o, t)
        if q < m[L.H_OPS]:  # pull the later rerun forward
            mark = m[L.H_JOURNAL]
            held = max(budget, max_range(m, t, q))
            if not drop(m, o, q) or max_range(m, t, q) > held:
                undo(m, mark)
    return True


@inner
def offer(m: Words, count: int, what: int, u: int, price: float) -> int:
    """Insert an offer to rerun or load ``what`` at ``u`` into the sorted list of at most ``OFFERS``; the new length.

    An offer is three words: price in units of ``1 / PRICE`` cost per byte, op or negative address of a buffer, stage.
    """
    offers, worth = m[L.H_OFFERS_AT], int(min(price * PRICE, 4e18))
    if count == L.OFFERS and worth >= m[offers + 3 * (count - 1)]:
        return count
    k = offers + 3 * min(count, L.OFFERS - 1)
    while k > offers and m[k - 3] > worth:
        m[k], m[k + 1], m[k + 2] = m[k - 3], m[k - 2], m[k - 1]
        k -= 3
    m[k], m[k + 1], m[k + 2] = worth, what, u
    return min(count + 1, L.OFFERS)


@inner
def noisy(m: Words, price: float, noise: float, forbidden: bool) -> float:
    """A price with noise, and much higher where the same move has just dropped this."""
    price *= 1.0 - noise + 2.0 * noise * draw(m) if noise > 0.0 else 1.0
    return price * FORBIDDEN if forbidden else price


@apart
def collect(m: Words, t: int, excess: int, noise: float, trust: float, lane: float, stamp: int) -> int:
    """Fill the list of offers with the gaps around stage ``t``, cheapest per byte first; their number.

    Between the price of an op or of a transfer by itself (0) and what was last measured (1) stands ``trust``.
    """
    count = int(NOTHING)
    for o in range(t):
        row = at(o)
        may_run = m[row + L.OP_LIMIT] > o and m[L.H_MOVES_ONLY] == 0
        if m[row + L.OP_REACH] < t or not (may_run or m[L.H_TIERS] > 0):
            continue
        p, q = runs_around(m, o, t)
        idle, idle_use, partly, partly_use, ending = 0, q, 0, q, 0
        for i in range(m[row + L.OP_OUT], m[row + L.OP_OUT_END]):
            b = m[i]
            if m[b + L.B_PINNED] == 1:
                continue
            made, following = p, q
            if m[b + L.B_LOADS] >= 0:
                made, following = made_around(m, b, t)
            last, use = reads_around(m, b, t)
            size = m[b + L.B_BYTES]
            if use < following:
                if last < t and (made < t or made > p):
                    idle += size
                    idle_use = min(idle_use, use)
                    if m[b + L.B_TIER] >= 0:
                        moved = float(m[b + L.B_IN] + m[b + L.B_OUT])
                        fresh = not (is_loaded(m, b, made) and last < made)  # else it was loaded long before
                        known = trust * m[b + L.B_ESTIMATE] + ((1.0 - trust) * lane * moved if fresh else 0.0)
                        known = noisy(m, max(known, FAINT * moved), noise, m[b + L.B_FORBID] == stamp)
                        count = offer(m, count, -b, use, known / min(size, excess))
                else:
                    partly += size
                    partly_use = min(partly_use, use)
            elif made < t and m[b + L.B_HOLD] >= t and last < t and m[b + L.B_HOLD] < following:
                known = max(trust * m[b + L.B_ESTIMATE], FAINT * m[b + L.B_OUT])
                count = offer(m, count, -b, int(MINUS), known / min(size, excess))
            elif made < t and last == t:
                ending += size
        if not may_run:
            continue
        known = m[row + L.OP_COST] + trust * (m[row + L.OP_ESTIMATE] - m[row + L.OP_COST])
        known = noisy(m, known, noise, m[row + L.OP_FORBID] == stamp)
        if idle > 0 and idle_use <= m[row + L.OP_LIMIT]:
            count = offer(m, count, o, idle_use, known / min(idle, excess))
        if partly > 0 and partly_use <= m[row + L.OP_LIMIT]:
            count = offer(m, count, o, partly_use, 3.0 * known / min(partly, excess))
        if ending > 0 and m[at(t) + L.S_HEAD] != at(t) and t <= m[row + L.OP_LIMIT]:
            count = offer(m, count, o, t, 6.0 * known / min(ending, excess))
    return count


@apart
def evict_load(m: Words, b: int, u: int, t: int, budget: int) -> bool:
    """Have ``b`` away at stage ``t``: loaded for its use at ``u``, or for -1 held less long.

    What is only held, or loaded long before, goes from all stages around that are over the budget as well: one by one,
    each would have a small price, and all together a large one.
    """
    if u < 0:
        last, _ = reads_around(m, b, t)
        end = max(m[b + L.B_PRODUCER], last)
        stage = t - 1
        for s in range(t - 1, end, -1):
            if value(m, s) > budget:
                stage = s - 1
        return hold(m, b, stage if stage > end else int(MINUS))
    fresh = m[b + L.B_LOADS] < 0
    first = t + 1
    made, _ = made_around(m, b, t)
    last, _ = reads_around(m, b, t)
    if last < made and is_loaded(m, b, made):
        for s in range(t + 1, u):
            if value(m, s) > budget:
                first = s + 1
    stage = place(m, b, first, u, 1 << 62)
    if not may_load(m, b, stage) or not put_load(m, b, stage):
        return False
    return not fresh or place_hold(m, b, t - 1)


@inner
def small_bytes(m: Words, o: int, share: float) -> int:
    """A share of the bytes of the outputs of ``o``."""
    size, row = 0, at(o)
    if share > 0.0:
        for i in range(m[row + L.OP_OUT], m[row + L.OP_OUT_END]):
            size += m[m[i] + L.B_BYTES]
    return int(size * share)


@apart
def evict(
    m: Words, what: int, u: int, t: int, budget: int, share: float, limit: int, lane: float, before: int
) -> float:
    """Apply an offer; its measured price, or -1 if it gains nothing at stage ``t`` (the caller undoes it).

    ``before`` is the objective without it.
    """
    at_t, at_u = value(m, t), value(m, max(u, 0))
    if what < 0:
        if not evict_load(m, -what, u, t, budget):
            return -1.0
    elif not make(m, what, u, budget, small_bytes(m, what, share), limit, lane):
        return -1.0
    gain = min(at_t - value(m, t), at_t - budget)
    if u > t:
        gain -= max(0, value(m, u) - max(budget, at_u))
    if gain <= 0 and m[L.H_TIERS] > 0:  # what gains nothing is measured too where that takes no walk
        return -1.0
    added = max(objective(m) - before, 0)
    faint = 0.0
    if what < 0:
        m[L.B_ESTIMATE - what] = added
        faint = FAINT * (m[L.B_IN - what] + m[L.B_OUT - what])
    else:
        m[at(what) + L.OP_ESTIMATE] = added
    return max(added + faint, 1.0) / gain if gain > 0 else -1.0


@inner
def early(m: Words, o: int, t: int, u: int) -> int:
    """The last stage in ``(t, u]`` up to which every input of ``o`` that lives beyond ``t`` lives anyway."""
    found = u
    row = at(o)
    for i in range(m[row + L.OP_IN], m[row + L.OP_IN_END]):
        b = m[i]
        if m[b + L.B_PINNED] == 0:
            made, following = runs_around(m, m[b + L.B_PRODUCER], u)
            end = end_of(m, b, made, following)
            if t < end < found:
                found = end
    return found


@apart
def lighten(m: Words, t: int) -> bool:
    """Drop one rerun of stage ``t`` if that alone lowers it; whether one was found."""
    at_t = value(m, t)
    v = m[at(t) + L.S_HEAD]
    tries = 0
    while m[v + L.N_OP] != t and tries < 16:
        o = m[v + L.N_OP]
        mark = m[L.H_JOURNAL]
        worst = m[m[L.H_TOP] + 1]
        if drop(m, o, t) and value(m, t) < at_t and m[m[L.H_TOP] + 1] <= worst:
            return True
        undo(m, mark)
        v = m[v + L.N_IN_STAGE]
        tries += 1
    return False


@apart
def lower(
    m: Words, t: int, budget: int, noise: float, trust: float, share: float, limit: int, lane: float, stamp: int
) -> bool:
    """Bring stage ``t`` down by one eviction (clause 4); false if no offer gains anything."""
    offers, tiers = m[L.H_OFFERS_AT], m[L.H_TIERS] > 0
    best, best_stage, best_price = 0, -2, 0.0
    before = objective(m)
    turns = int(TURNS) if tiers else 1  # without lanes that fill, what was measured is what it costs
    for turn in range(turns):
        count = collect(m, t, value(m, t) - budget, noise, trust if turn == 0 else 1.0, lane, stamp)
        end = offers + 3 * count
        done = False
        for k in range(offers, end, 3):
            if best_stage > -2 and best_price * PRICE <= m[k]:
                done = True
                break
            what, stage = m[k + 1], m[k + 2]
            mark = m[L.H_JOURNAL]
            if not tiers and noise > 0.0 and draw(m) < EARLY * m[L.H_EARLY]:
                stage = early(m, what, t, stage)
            price = evict(m, what, stage, t, budget, share, limit, lane, before)
            better = price >= 0.0 and (best_stage == -2 or price < best_price)
            if better and (price * PRICE <= m[k + 3] if k + 3 < end else turns == 1):
                return True
            undo(m, mark)
            if better:
                best, best_stage, best_price = what, stage, price
        if done or count < L.OFFERS or noise > MUCH:
            break
    if best_stage > -2:
        evict(m, best, best_stage, t, budget, share, limit, lane, before)
        return True
    return lighten(m, t)


@apart
def repair(
    m: Words,
    budget: int,
    noise: float,
    trust: float,
    share: float,
    limit: int,
    lane: float,
    stamp: int,
    steps: int,
    final: int,
) -> int:
    """Evict until every stage fits (clause 4), at most ``steps`` times; ``final`` 1 makes each step final.

    It fails where reruns, or the objective, are beyond ``limit``.
    """
    for _ in range(steps):
        if m[m[L.H_TOP] + 1] <= budget:
            return int(DONE)
        if m[L.H_COST] > limit or objective(m) > limit or m[L.H_WORK] > m[L.H_WORK_LIMIT]:
            return int(FAILED)
        if final == 1:
            m[L.H_JOURNAL] = 0
        t = argmax(m)
        if t >= m[L.H_OPS] or not lower(m, t, budget, noise, trust, share, limit, lane, stamp):
            return int(FAILED)
    return int(DONE) if m[m[L.H_TOP] + 1] <= budget else int(UNFINISHED)
