"""Changes of the interval state that planners are made of, compiled: evict, cancel, repair, clean up, anneal.

1. *Evict* an op's outputs over an idle gap around stage ``t``: rerun the op right before their next use, and
   take each missing input by the first that fits: hold it longer, or rerun its producer too, to any depth. A
   rerun that already stands later is pulled forward (taken away there) wherever its outputs can be held.
2. *Cancel* a rerun: its outputs are held instead, and reruns that only served it go with it.
3. *Repair*: while some stage is over the budget, take the highest, offer its idle gaps by added cost per byte
   gained, and apply the best. Prices of offers are the last measured ones, so an offer is applied to be measured
   and accepted when no other's price undercuts it: a lazy heap with a few live entries.
4. *Anneal*: cancel a few reruns, insert one or retime one; repair with noise, clean up around them; keep by
   Metropolis' rule, else undo. With ``H_EARLY`` set, reruns may stand before the stage of their next use: held
   until then, their outputs can cost less than what the rerun's inputs would have held (ADR 0025).
"""

from __future__ import annotations

import math

from ebbtide.planners.search.interval_kernels import (
    add_run,
    end_of,
    remove_run,
    runs_around,
    save_best,
    undo,
    uses_around,
)
from ebbtide.planners.search.jit import Words, apart, inner
from ebbtide.planners.search.layout import (
    B_BYTES,
    B_PINNED,
    B_PRODUCER,
    H_BEST_COST,
    H_COST,
    H_EARLY,
    H_HIGH,
    H_JOURNAL,
    H_NODES,
    H_OFFERS_AT,
    H_OPS,
    H_PENDING_AT,
    H_RANDOM,
    H_RERUNS,
    H_ROOM,
    H_STACK_AT,
    H_TOP,
    H_WORK,
    H_WORK_LIMIT,
    N_COLUMNS,
    N_IN_STAGE,
    N_OP,
    N_STAGE,
    OFFERS,
    OP_COST,
    OP_ESTIMATE,
    OP_FORBID,
    OP_IN,
    OP_IN_END,
    OP_LIMIT,
    OP_OUT,
    OP_OUT_END,
    OP_REACH,
    S_HEAD,
    at,
)
from ebbtide.planners.search.segment_tree import argmax, max_range, value

__all__ = ["DONE", "FAILED", "UNFINISHED", "anneal", "clean_up", "repair"]

UNFINISHED, DONE, FAILED = 0, 1, 2  # answers of repair
STEPS = 60  # evictions after which the repair of one move is given up
NOTHING = 0  # passed as int(NOTHING): numba would compile a function anew for each literal argument
RUIN = 8  # reruns cancelled by one move at most
CLEAN = 6  # cancellations tried after each move
INSERT, RETIME = 0.15, 0.15  # shares of moves that begin so; the others cancel a few reruns first
DEAR = 8  # times the op's own cost: what an inserted or retimed rerun may add with all that it needs
EARLY = 0.3  # of the evictions of a noisy repair place the rerun where its inputs live anyway
INSERT_EARLY = 0.5  # of the inserted reruns stand at a random stage before the next use
RETIME_ANYWHERE = 0.25  # of the retimed reruns go to a random stage, not to where their inputs live anyway
FORBIDDEN = 1e3  # price factor of an eviction that the same move has just cancelled
PRICE = float(1 << 20)  # prices are kept as integers in units of 1 / PRICE cost per byte


@inner
def draw(m: Words) -> float:
    """A number in [0, 1): xorshift64 (Marsaglia 2003), so that plans are reproducible everywhere."""
    x = m[H_RANDOM]
    x ^= x << 13
    x ^= (x >> 7) & 0x01FFFFFFFFFFFFFF
    x ^= x << 17
    m[H_RANDOM] = x
    return ((x >> 11) & 0x1FFFFFFFFFFFFF) / 9007199254740992.0


@inner
def useless(m: Words, o: int, p: int, q: int) -> bool:
    """Whether no output of ``o`` made at ``p`` is read before it is made again at ``q``."""
    row = at(o)
    for i in range(m[row + OP_OUT], m[row + OP_OUT_END]):
        b = m[i]
        if m[b + B_PINNED] == 0:
            last, _ = uses_around(m, b, q - 1)
            if last >= p:
                return False
    return True


@apart
def cancel(m: Words, o: int, t: int) -> bool:
    """Take away a rerun and the reruns that only served it (clause 2); false if the journal is full."""
    pending = m[H_PENDING_AT]
    m[pending], m[pending + 1] = o, t
    count = 1
    while count > 0:
        count -= 1
        o, t = m[pending + 2 * count], m[pending + 2 * count + 1]
        before, _ = runs_around(m, o, t)
        if before != t:
            continue
        if not remove_run(m, o, t):
            return False
        row = at(o)
        for i in range(m[row + OP_IN], m[row + OP_IN_END]):
            b = m[i]
            if m[b + B_PINNED] == 0:
                producer = m[b + B_PRODUCER]
                p, q = runs_around(m, producer, t)
                if p > producer and useless(m, producer, p, q) and count < m[H_ROOM]:
                    m[pending + 2 * count], m[pending + 2 * count + 1] = producer, p
                    count += 1
    return True


@apart
def make(m: Words, o: int, t: int, budget: int, small: int, cost_limit: int) -> bool:
    """Rerun ``o`` at ``t`` with all it needs (clause 1); false if that is impossible or beyond ``cost_limit``.

    Inputs of up to ``small`` bytes may be held through stages that are over the budget.
    """
    stack = m[H_STACK_AT]
    m[stack] = o
    count = 1
    while count > 0:
        count -= 1
        o = m[stack + count]
        before, _ = runs_around(m, o, t)
        if before == t:
            continue
        row = at(o)
        for i in range(m[row + OP_IN], m[row + OP_IN_END]):
            b = m[i]
            if m[b + B_PINNED] == 1:
                continue
            producer = m[b + B_PRODUCER]
            p, q = runs_around(m, producer, t)
            end = end_of(m, b, p, q)
            size = m[b + B_BYTES]
            if end >= t or size <= small:
                continue
            if max_range(m, max(end, p + 1), t - 1) + size > budget:
                if t > m[at(producer) + OP_LIMIT] or count + 1 >= m[H_ROOM]:
                    return False
                m[stack + count] = producer
                count += 1
        if not add_run(m, o, t) or m[H_COST] > cost_limit:
            return False
        _, q = runs_around(m, o, t)
        if q < m[H_OPS]:  # pull the later rerun forward
            mark = m[H_JOURNAL]
            held = max(budget, max_range(m, t, q))
            if not cancel(m, o, q) or max_range(m, t, q) > held:
                undo(m, mark)
    return True


@inner
def offer(m: Words, count: int, o: int, u: int, price: float) -> int:
    """Insert an offer to rerun ``o`` at ``u`` into the sorted list of at most ``OFFERS``; the new length.

    An offer is three words: price in units of ``1 / PRICE`` cost per byte, op, stage.
    """
    offers, worth = m[H_OFFERS_AT], int(min(price * PRICE, 4e18))
    if count == OFFERS and worth >= m[offers + 3 * (count - 1)]:
        return count
    k = offers + 3 * min(count, OFFERS - 1)
    while k > offers and m[k - 3] > worth:
        m[k], m[k + 1], m[k + 2] = m[k - 3], m[k - 2], m[k - 1]
        k -= 3
    m[k], m[k + 1], m[k + 2] = worth, o, u
    return min(count + 1, OFFERS)


@apart
def collect(m: Words, t: int, excess: int, noise: float, trust: float, stamp: int) -> int:
    """Fill the list of offers with the gaps around stage ``t``, cheapest per byte first; their number."""
    count = int(NOTHING)
    for o in range(t):
        row = at(o)
        if m[row + OP_REACH] < t or m[row + OP_LIMIT] <= o:
            continue
        p, q = runs_around(m, o, t)
        idle, idle_use, partly, partly_use, ending = 0, q, 0, q, 0
        for i in range(m[row + OP_OUT], m[row + OP_OUT_END]):
            b = m[i]
            if m[b + B_PINNED] == 1:
                continue
            last, use = uses_around(m, b, t)
            if use < q:
                if p < t and last < t:
                    idle += m[b + B_BYTES]
                    idle_use = min(idle_use, use)
                else:
                    partly += m[b + B_BYTES]
                    partly_use = min(partly_use, use)
            elif p < t and last == t:
                ending += m[b + B_BYTES]
        known = m[row + OP_COST] + trust * (m[row + OP_ESTIMATE] - m[row + OP_COST])
        known *= 1.0 - noise + 2.0 * noise * draw(m) if noise > 0.0 else 1.0
        if m[row + OP_FORBID] == stamp:
            known *= FORBIDDEN
        if idle > 0 and idle_use <= m[row + OP_LIMIT]:
            count = offer(m, count, o, idle_use, known / min(idle, excess))
        if partly > 0 and partly_use <= m[row + OP_LIMIT]:
            count = offer(m, count, o, partly_use, 3.0 * known / min(partly, excess))
        if ending > 0 and m[at(t) + S_HEAD] != at(t) and t <= m[row + OP_LIMIT]:
            count = offer(m, count, o, t, 6.0 * known / min(ending, excess))
    return count


@apart
def evict(m: Words, o: int, u: int, t: int, budget: int, share: float, cost_limit: int) -> float:
    """Apply an offer; its measured price, or -1 if it gains nothing at stage ``t`` (the caller undoes it)."""
    at_t, at_u, cost = value(m, t), value(m, u), m[H_COST]
    small = 0
    if share > 0.0:
        row = at(o)
        for i in range(m[row + OP_OUT], m[row + OP_OUT_END]):
            small += m[m[i] + B_BYTES]
        small = int(small * share)
    if not make(m, o, u, budget, small, cost_limit):
        return -1.0
    gain = min(at_t - value(m, t), at_t - budget)
    if u != t:
        gain -= max(0, value(m, u) - max(budget, at_u))
    added = m[H_COST] - cost
    m[at(o) + OP_ESTIMATE] = max(added, 0)
    if gain <= 0:
        return -1.0
    return max(added, 1) / gain


@inner
def early(m: Words, o: int, t: int, u: int) -> int:
    """The last stage in ``(t, u]`` up to which every input of ``o`` that lives beyond ``t`` lives anyway."""
    found = u
    row = at(o)
    for i in range(m[row + OP_IN], m[row + OP_IN_END]):
        b = m[i]
        if m[b + B_PINNED] == 0:
            made, following = runs_around(m, m[b + B_PRODUCER], u)
            end = end_of(m, b, made, following)
            if t < end < found:
                found = end
    return found


@apart
def lighten(m: Words, t: int, budget: int) -> bool:
    """Cancel one rerun of stage ``t`` if that alone lowers it; whether one was found."""
    at_t = value(m, t)
    v = m[at(t) + S_HEAD]
    tries = 0
    while m[v + N_OP] != t and tries < 16:
        o = m[v + N_OP]
        mark = m[H_JOURNAL]
        worst = m[m[H_TOP] + 1]
        if cancel(m, o, t) and value(m, t) < at_t and m[m[H_TOP] + 1] <= worst:
            return True
        undo(m, mark)
        v = m[v + N_IN_STAGE]
        tries += 1
    return False


@apart
def lower(m: Words, t: int, budget: int, noise: float, trust: float, share: float, cost_limit: int, stamp: int) -> bool:
    """Bring stage ``t`` down by one eviction (clause 3); false if no offer gains anything."""
    count = collect(m, t, value(m, t) - budget, noise, trust, stamp)
    offers = m[H_OFFERS_AT]
    best, best_price = -1, 0.0
    for k in range(offers, offers + 3 * count, 3):
        if best >= 0 and best_price * PRICE <= m[k]:
            break
        mark = m[H_JOURNAL]
        if noise > 0.0 and draw(m) < EARLY * m[H_EARLY]:
            m[k + 2] = early(m, m[k + 1], t, m[k + 2])
        price = evict(m, m[k + 1], m[k + 2], t, budget, share, cost_limit)
        better = price >= 0.0 and (best < 0 or price < best_price)
        if better and (k + 3 == offers + 3 * count or price * PRICE <= m[k + 3]):
            return True
        undo(m, mark)
        if better:
            best, best_price = k, price
    if best >= 0:
        evict(m, m[best + 1], m[best + 2], t, budget, share, cost_limit)
        return True
    return lighten(m, t, budget)


@apart
def repair(
    m: Words, budget: int, noise: float, trust: float, share: float, cost_limit: int, stamp: int, steps: int, final: int
) -> int:
    """Evict until every stage fits (clause 3), at most ``steps`` times; ``final`` 1 makes each step final."""
    for _ in range(steps):
        if m[m[H_TOP] + 1] <= budget:
            return DONE
        if m[H_COST] > cost_limit or m[H_WORK] > m[H_WORK_LIMIT]:
            return FAILED
        if final:
            m[H_JOURNAL] = 0
        t = argmax(m)
        if t >= m[H_OPS] or not lower(m, t, budget, noise, trust, share, cost_limit, stamp):
            return FAILED
    return DONE if m[m[H_TOP] + 1] <= budget else UNFINISHED


@apart
def try_cancel(m: Words, v: int, budget: int) -> bool:
    """Cancel the rerun in row ``v`` if everything still fits and nothing costs more; whether it was done."""
    mark = m[H_JOURNAL]
    if cancel(m, m[v + N_OP], m[v + N_STAGE]) and m[m[H_TOP] + 1] <= budget:
        return True
    undo(m, mark)
    return False


@apart
def clean_up(m: Words, budget: int) -> int:
    """Try to cancel every rerun once; how many were cancelled. Final: the journal is emptied."""
    done = 0
    for v in range(m[H_HIGH] - N_COLUMNS, m[H_NODES] - 1, -N_COLUMNS):
        if m[v + N_OP] >= 0:
            m[H_JOURNAL] = 0
            done += try_cancel(m, v, budget)
    m[H_JOURNAL] = 0
    return done


@inner
def pick(m: Words) -> int:
    """The row of a random rerun; -1 if there is none."""
    rows = (m[H_HIGH] - m[H_NODES]) // N_COLUMNS
    if m[H_RERUNS] == 0:
        return -1
    for _ in range(64):
        v = m[H_NODES] + int(draw(m) * rows) * N_COLUMNS
        if m[v + N_OP] >= 0:
            return v
    return -1


@inner
def near(m: Words, o: int, t: int, window: int) -> int:
    """The row of a random rerun whose op or stage lies near; -1 if none was hit."""
    for _ in range(24):
        v = pick(m)
        if v >= 0 and (abs(m[v + N_OP] - o) <= window or abs(m[v + N_STAGE] - t) <= window // 4):
            return v
    return -1


@apart
def ruin(m: Words, stamp: int) -> bool:
    """Cancel a few random reruns, or those of one neighbourhood; false if there are none."""
    v = pick(m)
    if v < 0:
        return False
    o, t = m[v + N_OP], m[v + N_STAGE]
    kind = draw(m)
    count = 1 + int(draw(m) * draw(m) * RUIN)
    window = 4 + int(draw(m) * 60)
    for _ in range(count):
        each = m[v + N_OP]
        if draw(m) < 0.8:
            m[at(each) + OP_FORBID] = stamp
        if not cancel(m, each, m[v + N_STAGE]):
            return False
        v = pick(m) if kind < 0.3 else near(m, o, t, window)
        if v < 0:
            break
    return True


@apart
def insert(m: Words, budget: int) -> bool:
    """Rerun a random op for a later use of its outputs, over the budget if need be; false if that is impossible."""
    n = m[H_OPS]
    o = int(draw(m) * n)
    t = o + int(draw(m) * (n - o))
    _, q = runs_around(m, o, t)
    use = q
    row = at(o)
    for i in range(m[row + OP_OUT], m[row + OP_OUT_END]):
        b = m[i]
        if m[b + B_PINNED] == 0:
            _, after = uses_around(m, b, t)
            use = min(use, after)
    if use >= q or use > m[at(o) + OP_LIMIT]:
        return False
    if draw(m) < INSERT_EARLY * m[H_EARLY]:
        use = t + 1 + int(draw(m) * (use - t))
    return make(m, o, use, budget, int(NOTHING), m[H_COST] + int(DEAR) * m[at(o) + OP_COST])


@apart
def retime(m: Words, budget: int) -> bool:
    """Rerun a random rerun's op earlier, where its inputs live anyway or anywhere; false if that is impossible."""
    v = pick(m)
    if v < 0:
        return False
    o, t = m[v + N_OP], m[v + N_STAGE]
    if not cancel(m, o, t):
        return False
    made, _ = runs_around(m, o, t)
    u = early(m, o, made, t)
    if u == t or draw(m) < RETIME_ANYWHERE:
        u = made + 1 + int(draw(m) * (t - made))
    return make(m, o, u, budget, int(NOTHING), m[H_COST] + int(DEAR) * m[at(o) + OP_COST])


@apart
def anneal(m: Words, budget: int, first: int, last: int, total: int, hot: float) -> None:
    """Moves ``first..last-1`` of ``total`` (clause 4); the best is kept in the place of the best.

    ``hot`` is the temperature at the start, in cost; it falls linearly to nothing.
    """
    for move in range(first, last):
        if m[H_WORK] > m[H_WORK_LIMIT]:
            break
        m[H_JOURNAL] = 0
        cost = m[H_COST]
        heat = hot * (1.0 - move / total)
        limit = cost + int(-heat * math.log(1.0 - draw(m)))
        stamp = move + 1
        kind = draw(m)
        if kind < INSERT:
            fine = insert(m, budget)
        else:
            fine = retime(m, budget) if kind < INSERT + RETIME * m[H_EARLY] else ruin(m, stamp)
        share = 0.6 if draw(m) < 0.3 else 0.0
        noise = 0.9 * draw(m)
        if fine:
            slack = limit + max((limit - m[H_COST]) // 2, 0)
            fine = repair(m, budget, noise, draw(m), share, slack, stamp, int(STEPS), int(NOTHING)) == DONE
        if fine:
            for _ in range(CLEAN):
                v = pick(m)
                if v >= 0:
                    try_cancel(m, v, budget)
        if fine and m[H_COST] <= limit:
            if m[H_COST] < m[H_BEST_COST]:
                save_best(m)
        else:
            undo(m, int(NOTHING))
    m[H_JOURNAL] = 0
