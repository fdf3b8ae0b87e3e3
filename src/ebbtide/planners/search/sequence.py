"""A sequence of runs with no-ops between them, compiled: its exact bytes, and annealing by single runs.

Definitions:
1. The *sequence* has a power of two of slots. A slot is empty (a no-op), a run of an op, or the boundary. An op
   runs in at least one slot; its *first* run is the one in the lowest. Slots are spread anew every so often, so that
   there is room between any two runs.
2. A sequence is *valid* if first runs and the boundary keep their precedences: producers before readers, random
   and single-run ops in captured order, the boundary behind what has to run before it (forward outputs,
   mutations, random and single-run ops of the forward, ops that read what it changes) and before what depends on a
   tangent. Reruns follow their first run and nothing else: what they read is held as long as they need it.
3. A production at ``p`` is held in the slots ``[p, e]``: ``e`` is the last slot that reads it before the op's next run,
   or ``p``. A pinned buffer is held from its first production to the end, a mutation to the boundary; a rerun
   takes their bytes once more while it runs. A random op that runs again keeps its state from its first run to its last
   and takes it once more in each repeat.
4. The bytes of a slot are the sum of what is held there, by range additions to a tree of maxima: those of an empty slot
   are at most those of the run before it, so the root is the peak.

Because the bytes depend on the sequence alone, a move that is not kept is taken back by the opposite moves.

One flat array holds it all (``layout`` says why): a header, a row per op and one for the boundary, a row per buffer,
lists, and tables with one word per slot.
"""

from __future__ import annotations

import math

from ebbtide.planners.search.draws import draw
from ebbtide.planners.search.jit import Words, apart, inner
from ebbtide.planners.search.layout import H_ADD, H_TOP, H_TREE_SIZE
from ebbtide.planners.search.segment_tree import add_range, argmax

__all__ = ["anneal_runs", "lay_order", "save_order", "spread"]

# Header; the tree and the random state keep the places that _layout gives them.
Q_OPS, Q_OP_AT, Q_NEXT_AT, Q_INDEX_AT, Q_RUNS_AT, Q_RUNS, Q_ROOM = 0, 1, 2, 3, 4, 5, 6
Q_REPEATED_AT, Q_REPEATED = 10, 11  # ops that run more than once
Q_BOUNDARY, Q_LATE, Q_EXCESS, Q_MUTATED = 12, 13, 14, 15  # bytes: late, between two graphs only, all mutations
Q_COST, Q_BUDGET, Q_BASE = 16, 17, 18
Q_BEST_AT, Q_BEST, Q_BEST_COST, Q_BEST_PEAK, Q_ORDER_AT = 19, 20, 21, 22, 24
Q_LOG_AT, Q_LOG = 25, 26  # what the present move has changed so far
# Columns of an op; the boundary's row has a first slot and precedences only.
R_FIRST, R_COUNT, R_COST, R_WORKSPACE, R_STATE, R_MAY_REPEAT, R_EARLY = 0, 1, 2, 3, 4, 5, 6
R_IN, R_IN_END, R_OUT, R_OUT_END, R_BEFORE, R_BEFORE_END, R_AFTER, R_AFTER_END = 7, 8, 9, 10, 11, 12, 13, 14
R_REPEATED_AT = 15
R_COLUMNS = 16
# Columns of a buffer.
V_BYTES, V_PRODUCER, V_KIND, V_ONCE, V_READ, V_READ_END = 0, 1, 2, 3, 4, 5
V_COLUMNS = 6
HELD_FOR_READERS, PINNED, MUTATION = 0, 1, 2  # V_KIND
Q_HEADER = 32

PLUS, MINUS = 1, -1  # passed as int(PLUS): numba would compile a function anew for each literal argument
SPREAD_EVERY = 4096  # moves
LOG_ROWS = 8  # changes of one move at most
NEAR = 64  # slots looked at for an empty one, and the farthest that a local shift goes
TRIES = 8
SHARE_REMOVE, SHARE_INSERT, SHARE_BOUNDARY = 0.2, 0.45, 0.46  # of moves, cumulated; the rest shift a run


@inner
def row_of(o: int) -> int:
    """The address of the row of op ``o``; of the boundary, if ``o`` is the number of ops."""
    return Q_HEADER + o * R_COLUMNS


@inner
def around(m: Words, o: int, p: int) -> tuple[int, int]:
    """The last run of op ``o`` before slot ``p`` (-1: none) and the first after it (number of slots: none)."""
    before, v, following = -1, m[row_of(o) + R_FIRST], m[Q_NEXT_AT]
    while v >= 0:
        if v > p:
            return before, v
        if v < p:
            before = v
        v = m[following + v]
    return before, m[H_TREE_SIZE]


@inner
def last_read(m: Words, b: int, p: int, q: int) -> int:
    """The last slot between ``p`` and ``q`` that reads buffer ``b``, or ``p``."""
    last, following = p, m[Q_NEXT_AT]
    for i in range(m[b + V_READ], m[b + V_READ_END]):
        v = m[row_of(m[i]) + R_FIRST]
        while v >= 0 and v < q:
            last = max(last, v)
            v = m[following + v]
    return last


@inner
def link(m: Words, o: int, p: int) -> None:
    """Enter a run of ``o`` at ``p`` into slots and lists."""
    row, following = row_of(o), m[Q_NEXT_AT]
    before, _ = around(m, o, p)
    if before < 0:
        m[following + p] = m[row + R_FIRST]
        m[row + R_FIRST] = p
    else:
        m[following + p] = m[following + before]
        m[following + before] = p
    m[m[Q_OP_AT] + p] = o
    m[m[Q_INDEX_AT] + p] = m[Q_RUNS]
    m[m[Q_RUNS_AT] + m[Q_RUNS]] = p
    m[Q_RUNS] += 1
    m[row + R_COUNT] += 1
    if m[row + R_COUNT] == 2:
        m[row + R_REPEATED_AT] = m[Q_REPEATED]
        m[m[Q_REPEATED_AT] + m[Q_REPEATED]] = o
        m[Q_REPEATED] += 1


@inner
def unlink(m: Words, o: int, p: int) -> None:
    """Take the run of ``o`` at ``p`` out of slots and lists."""
    row, following = row_of(o), m[Q_NEXT_AT]
    before, _ = around(m, o, p)
    if before < 0:
        m[row + R_FIRST] = m[following + p]
    else:
        m[following + before] = m[following + p]
    m[m[Q_OP_AT] + p] = -1
    m[Q_RUNS] -= 1
    index, last = m[m[Q_INDEX_AT] + p], m[m[Q_RUNS_AT] + m[Q_RUNS]]
    m[m[Q_RUNS_AT] + index] = last
    m[m[Q_INDEX_AT] + last] = index
    m[row + R_COUNT] -= 1
    if m[row + R_COUNT] == 1:
        m[Q_REPEATED] -= 1
        index, other = m[row + R_REPEATED_AT], m[m[Q_REPEATED_AT] + m[Q_REPEATED]]
        m[m[Q_REPEATED_AT] + index] = other
        m[row_of(other) + R_REPEATED_AT] = index


@inner
def change_state(m: Words, o: int, p: int, sign: int) -> None:
    """Bytes of the generator state, given the other runs of ``o`` (definition 3)."""
    row, following = row_of(o), m[Q_NEXT_AT]
    first = m[row + R_FIRST]
    if first < 0:
        return
    last = first
    while m[following + last] >= 0:
        last = m[following + last]
    size, low, high = sign * m[row + R_STATE], min(p, first), max(p, last)
    if first == last:
        add_range(m, low, high, size)
    else:
        add_range(m, low, first - 1, size)
        add_range(m, last + 1, high, size)
    repeat = first if p < first else p
    add_range(m, repeat, repeat, size)


@apart
def change_sequence(m: Words, o: int, p: int, sign: int) -> None:
    """Add (``sign`` 1) or take away (-1) the run of ``o`` at slot ``p``."""
    row = row_of(o)
    if sign < 0:
        unlink(m, o, p)
    before, after = around(m, o, p)
    end = m[H_TREE_SIZE]
    add_range(m, p, p, sign * m[row + R_WORKSPACE])
    for i in range(m[row + R_OUT], m[row + R_OUT_END]):
        b = m[i]
        size = sign * m[b + V_BYTES]
        if m[b + V_KIND] == HELD_FOR_READERS:
            last = last_read(m, b, p, after)
            if before < 0:
                add_range(m, p, last, size)
            elif last > p:
                add_range(m, last_read(m, b, before, p) + 1, p - 1, -size)
            else:
                add_range(m, p, p, size)
        elif before >= 0:
            add_range(m, p, p, size * (1 - m[b + V_ONCE]))
        else:
            last = m[Q_BOUNDARY] - 1 if m[b + V_KIND] == MUTATION else end - 1
            add_range(m, p, min(last, after - 1), size)
            if after < end:
                add_range(m, after, after, size * (1 - m[b + V_ONCE]))
    for i in range(m[row + R_IN], m[row + R_IN_END]):
        b = m[i]
        made, again = around(m, m[b + V_PRODUCER], p)
        last = last_read(m, b, made, again)
        if last < p:
            add_range(m, last + 1, p, sign * m[b + V_BYTES])
    if m[row + R_STATE] > 0:
        change_state(m, o, p, sign)
    if sign > 0:
        link(m, o, p)
    m[Q_COST] += sign * m[row + R_COST]


@apart
def change_boundary(m: Words, p: int) -> None:
    """Move the boundary to slot ``p``."""
    old = m[Q_BOUNDARY]
    arrives = m[Q_LATE] - m[Q_MUTATED]
    add_range(m, old, old, -m[Q_EXCESS])
    add_range(m, p, p, m[Q_EXCESS])
    add_range(m, p, old - 1, arrives)
    add_range(m, old, p - 1, -arrives)
    m[m[Q_OP_AT] + old] = -1
    m[m[Q_OP_AT] + p] = m[Q_OPS]
    m[Q_BOUNDARY] = p
    m[row_of(m[Q_OPS]) + R_FIRST] = p


@apart
def save_order(m: Words, to: int) -> int:
    """Write the ops in the order they run, the boundary as their number, from address ``to`` on; how many."""
    count = 0
    for p in range(m[H_TREE_SIZE]):
        if m[m[Q_OP_AT] + p] >= 0:
            m[to + count] = m[m[Q_OP_AT] + p]
            count += 1
    return count


@apart
def lay_order(m: Words, at: int, count: int) -> None:
    """Replace the sequence by the ``count`` ops at address ``at``, evenly spread."""
    slots, n = m[H_TREE_SIZE], m[Q_OPS]
    for p in range(slots):
        m[m[Q_OP_AT] + p] = m[m[Q_NEXT_AT] + p] = -1
        m[m[H_TOP] + p] = m[m[H_TOP] + slots + p] = m[m[H_ADD] + p] = m[m[H_ADD] + slots + p] = 0
    for o in range(n):
        m[row_of(o) + R_FIRST], m[row_of(o) + R_COUNT] = -1, 0
    m[Q_RUNS] = m[Q_REPEATED] = m[Q_COST] = 0
    for k in range(count):
        if m[at + k] == n:
            p = (2 * k + 1) * slots // (2 * count)
            m[Q_BOUNDARY] = p
            m[row_of(n) + R_FIRST] = p
            m[m[Q_OP_AT] + p] = n
    add_range(m, m[Q_BOUNDARY], slots - 1, m[Q_LATE])
    add_range(m, m[Q_BOUNDARY], m[Q_BOUNDARY], m[Q_EXCESS])
    for k in range(count):
        if m[at + k] != n:
            change_sequence(m, m[at + k], (2 * k + 1) * slots // (2 * count), int(PLUS))


@apart
def spread(m: Words) -> None:
    """Spread all runs evenly again (definition 1)."""
    lay_order(m, m[Q_ORDER_AT], save_order(m, m[Q_ORDER_AT]))


@inner
def note(m: Words, o: int, p: int, sign: int) -> None:
    """Change one run and note it; of the boundary, where it was."""
    k = m[Q_LOG_AT] + 3 * m[Q_LOG]
    m[k], m[k + 1], m[k + 2] = o, p, sign
    m[Q_LOG] += 1
    if o == m[Q_OPS]:
        m[k + 1] = m[Q_BOUNDARY]
        change_boundary(m, p)
    else:
        change_sequence(m, o, p, sign)


@apart
def take_back(m: Words) -> None:
    """Undo the present move."""
    while m[Q_LOG] > 0:
        m[Q_LOG] -= 1
        k = m[Q_LOG_AT] + 3 * m[Q_LOG]
        if m[k] == m[Q_OPS]:
            change_boundary(m, m[k + 1])
        else:
            change_sequence(m, m[k], m[k + 1], -m[k + 2])


@inner
def first_range(m: Words, o: int) -> tuple[int, int]:
    """Between which slots, both exclusive, the first run of ``o`` or the boundary may lie (definition 2)."""
    low, high = -1, m[H_TREE_SIZE]
    row, following = row_of(o), m[Q_NEXT_AT]
    for i in range(m[row + R_BEFORE], m[row + R_BEFORE_END]):
        before = row_of(m[i])
        v = m[before + R_FIRST]
        if o == m[Q_OPS] and m[before + R_EARLY] == 1:
            while m[following + v] >= 0:
                v = m[following + v]
        low = max(low, v)
    for i in range(m[row + R_AFTER], m[row + R_AFTER_END]):
        high = min(high, m[row_of(m[i]) + R_FIRST])
    return low, high


@inner
def vacant(m: Words, low: int, high: int, p: int) -> int:
    """An empty slot near ``p`` between ``low`` and ``high``, both exclusive; -1 if none is near."""
    for d in range(NEAR):
        if p + d < high and p + d > low and m[m[Q_OP_AT] + p + d] < 0:
            return p + d
        if p - d > low and p - d < high and m[m[Q_OP_AT] + p - d] < 0:
            return p - d
    return -1


@inner
def some(m: Words, count: int) -> int:
    """A random number below ``count``."""
    return min(int(draw(m) * count), count - 1)


@apart
def drop_some(m: Words) -> bool:
    """Take away a random run of an op that runs more than once; false if there is none or the op must run there."""
    if m[Q_REPEATED] == 0:
        return False
    o = m[m[Q_REPEATED_AT] + some(m, m[Q_REPEATED])]
    row, following = row_of(o), m[Q_NEXT_AT]
    k = some(m, m[row + R_COUNT])
    v = m[row + R_FIRST]
    if k == 0:
        _, high = first_range(m, o)
        if m[following + v] > high:
            return False
    for _ in range(k):
        v = m[following + v]
    note(m, o, v, int(MINUS))
    return True


@inner
def idle_since(m: Words, b: int, u: int) -> int:
    """The last slot before ``u`` that makes or reads buffer ``b``."""
    made, _ = around(m, m[b + V_PRODUCER], u)
    return last_read(m, b, made, u)


@apart
def rerun_before(m: Words, b: int, u: int, early: bool) -> bool:
    """Rerun the producer of buffer ``b`` before slot ``u``; false if that may not be or no slot is empty."""
    o = m[b + V_PRODUCER]
    row = row_of(o)
    low = idle_since(m, b, u)
    if m[row + R_MAY_REPEAT] == 0 or m[Q_RUNS] >= m[Q_ROOM] or m[Q_LOG] >= LOG_ROWS:
        return False
    start = low + 1 + some(m, u - low - 1) if early and u - low > 1 else u - 1
    p = vacant(m, low, u, start)
    if p < 0 or (m[row + R_EARLY] == 1 and p > m[Q_BOUNDARY]):
        return False
    note(m, o, p, int(PLUS))
    return True


@apart
def rerun_some(m: Words) -> bool:
    """Rerun what some run reads, at or before it, and with luck what that reads; false if nothing was inserted.

    Half of the time the read is one whose buffer lies idle through the peak.
    """
    peak_slot = argmax(m) if draw(m) < 0.5 else -1
    b = u = -1
    for _ in range(TRIES):
        v = m[m[Q_RUNS_AT] + some(m, m[Q_RUNS])]
        row = row_of(m[m[Q_OP_AT] + v])
        reads = m[row + R_IN_END] - m[row + R_IN]
        if reads == 0:
            continue
        b, u = m[m[row + R_IN] + some(m, reads)], v
        if peak_slot < 0 or (u > peak_slot and idle_since(m, b, u) < peak_slot):
            break
    if b < 0 or not rerun_before(m, b, u, draw(m) < 0.3):
        return False
    k = 0
    while peak_slot >= 0 and k < m[Q_LOG]:
        o, p = m[m[Q_LOG_AT] + 3 * k], m[m[Q_LOG_AT] + 3 * k + 1]
        for i in range(m[row_of(o) + R_IN], m[row_of(o) + R_IN_END]):
            if draw(m) < 0.5 and idle_since(m, m[i], p) < peak_slot:
                rerun_before(m, m[i], p, False)
        k += 1
    return True


@apart
def shift_some(m: Words) -> bool:
    """Move a random run; false if it stays where it is."""
    p = m[m[Q_RUNS_AT] + some(m, m[Q_RUNS])]
    o = m[m[Q_OP_AT] + p]
    row = row_of(o)
    before, after = around(m, o, p)
    low, high = first_range(m, o)
    if before >= 0:
        low, high = before, min(after, m[Q_BOUNDARY]) if m[row + R_EARLY] == 1 else after
    elif after < m[H_TREE_SIZE]:
        high = min(high, after)
    return shift_between(m, o, p, low, high)


@inner
def shift_between(m: Words, o: int, p: int, low: int, high: int) -> bool:
    """Move a run or the boundary from ``p`` to a slot between ``low`` and ``high``; false if it stays."""
    kind = draw(m)
    start = p - NEAR + some(m, 2 * NEAR + 1)
    if kind < 0.25:
        start = low + 1 + some(m, high - low - 1)
    elif kind < 0.5:
        start = high - 1
    elif kind < 0.75:
        start = low + 1
    target = vacant(m, low, high, start)
    if target < 0:
        return False
    if o != m[Q_OPS]:
        note(m, o, p, int(MINUS))
    note(m, o, target, int(PLUS))
    return True


@inner
def move(m: Words) -> bool:
    """Apply a random move; whether anything changed."""
    m[Q_LOG] = 0
    kind = draw(m)
    if kind < SHARE_REMOVE:
        return drop_some(m)
    if kind < SHARE_INSERT:
        return rerun_some(m)
    if kind < SHARE_BOUNDARY:
        low, high = first_range(m, m[Q_OPS])
        return shift_between(m, m[Q_OPS], m[Q_BOUNDARY], low, high)
    return shift_some(m)


@apart
def anneal_runs(m: Words, first: int, last: int, total: int, hot: float, cold: float, over: float) -> None:
    """Moves ``first..last-1`` of ``total``; the cheapest sequence that fits is kept as the best.

    The score is ``log(cost) + over * log(max(peak, budget))``; with ``over`` 0 a move that leaves the budget is never
    kept. Metropolis' rule, from temperature ``hot`` to ``cold`` geometrically.
    """
    budget = float(max(m[Q_BUDGET], 1))
    for k in range(first, last):
        if k % SPREAD_EVERY == 0:
            spread(m)
        cost, peak = m[Q_COST], m[m[H_TOP] + 1]
        if not move(m):
            continue
        worse = math.log(m[Q_COST] / cost)
        new_peak = m[m[H_TOP] + 1]
        if over > 0.0:
            worse += over * math.log(max(float(new_peak), budget) / max(float(peak), budget))
        elif new_peak > max(peak, m[Q_BUDGET]):
            worse = 1e9
        if worse > 0.0 and (worse > 1e8 or worse > -hot * (cold / hot) ** (k / total) * math.log(1.0 - draw(m))):
            take_back(m)
        elif new_peak <= m[Q_BUDGET] and m[Q_COST] < m[Q_BEST_COST]:
            m[Q_BEST_COST] = m[Q_COST]
            m[Q_BEST] = save_order(m, m[Q_BEST_AT])
