"""When loads are issued and until when buffers are held, as well as lanes and the budget allow, compiled.

Every load is as late as its lane allows while nothing waits for it, every hold until its copy is written, both as far
as the budget has room. Loads are timed backwards from what reads them, one after the other on a lane; one that is
issued before the boundary and read after it is to arrive at the boundary, which waits for it.
"""

from __future__ import annotations

from ebbtide.planners.search.clock import makespan
from ebbtide.planners.search.interval_kernels import add_load, hold, made_around, reads_around, remove_load, undo
from ebbtide.planners.search.jit import Words, apart
from ebbtide.planners.search.layout import (
    B_BYTES,
    B_COLUMNS,
    B_COPIED,
    B_HOLD,
    B_IN,
    B_IN_LANE,
    B_LOADS,
    B_PRODUCER,
    B_STALL,
    C_COLUMNS,
    C_NOW,
    H_BOUNDARY,
    H_BUFFERS,
    H_BUFFERS_END,
    H_CLOCKS,
    H_HIGH,
    H_JOURNAL,
    H_LOADS,
    H_NEEDS,
    H_NODES,
    H_OFFERS_AT,
    H_OPS,
    H_TOP,
    N_COLUMNS,
    N_NEXT,
    N_OP,
    N_STAGE,
)
from ebbtide.planners.search.segment_tree import max_range, value

__all__ = ["tighten"]

MINUS = -1  # passed as int(MINUS): numba would compile a function anew for each literal argument


@apart
def shift_loads(m: Words, budget: int) -> bool:
    """Issue loads by the clocks as last walked; false if the journal is full."""
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
    """Hold buffers by the clocks as last walked; false if the journal is full."""
    clocks = m[H_CLOCKS]
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
    """Time loads and holds; what makes nothing better is undone."""
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
