"""When loads are issued and until when buffers are held, as well as lanes and the budget allow, compiled.

Every load is as late as its lane allows while nothing waits for it, every hold until its copy is written, both as far
as the budget has room. Loads are timed backwards from what reads them, one after the other on a lane; one that is
issued before the boundary and read after it is to arrive at the boundary, which waits for it.
"""

from __future__ import annotations

from ebbtide.planners.search import layout as L
from ebbtide.planners.search.clock import makespan
from ebbtide.planners.search.interval_kernels import add_load, hold, made_around, reads_around, remove_load, undo
from ebbtide.planners.search.jit import Words, apart
from ebbtide.planners.search.segment_tree import max_range, value

__all__ = ["tighten"]

MINUS = -1  # passed as int(MINUS): numba would compile a function anew for each literal argument


@apart
def shift_loads(m: Words, budget: int) -> bool:
    """Issue loads by the clocks as last walked; false if the journal is full."""
    n, clocks, needs, late, boundary = m[L.H_OPS], m[L.H_CLOCKS], m[L.H_NEEDS], m[L.H_OFFERS_AT], m[L.H_BOUNDARY]
    for u in range(n + 1):
        m[needs + u] = -1
    for k in range(L.C_COLUMNS):
        m[late + k] = m[clocks + n * L.C_COLUMNS + L.C_NOW]
    for v in range(m[L.H_NODES], m[L.H_HIGH], L.N_COLUMNS):
        if m[v + L.N_OP] < -1:
            _, u = reads_around(m, -m[v + L.N_OP], m[v + L.N_STAGE] - 1)
            u = min(u, n)
            m[v + L.N_NEXT] = m[needs + u]
            m[needs + u] = v
    for u in range(n - 1, -1, -1):
        v = m[needs + u]
        while v >= 0:
            following = m[v + L.N_NEXT]
            b, t = -m[v + L.N_OP], m[v + L.N_STAGE]
            lane = late + m[b + L.B_IN_LANE]
            begin = min(m[clocks + u * L.C_COLUMNS + L.C_NOW], m[lane]) - m[b + L.B_IN]
            made, _ = made_around(m, b, t - 1)
            last, _ = reads_around(m, b, t - 1)
            least = max(made, last) + 1
            stage = u
            while stage > least and m[clocks + stage * L.C_COLUMNS + L.C_NOW] > begin:
                stage -= 1
                if stage + 1 == boundary:
                    begin = min(begin, m[clocks + boundary * L.C_COLUMNS + L.C_NOW] - m[b + L.B_IN])
            m[lane] = begin
            if stage < t and max_range(m, stage, t - 1) + m[b + L.B_BYTES] > budget:
                earliest, stage = stage, t
                while stage > earliest and value(m, stage - 1) + m[b + L.B_BYTES] <= budget:
                    stage -= 1
            if stage != t and not (remove_load(m, b, t) and add_load(m, b, stage)):
                return False
            v = following
    return True


@apart
def shift_holds(m: Words, budget: int) -> bool:
    """Hold buffers by the clocks as last walked; false if the journal is full."""
    clocks = m[L.H_CLOCKS]
    for b in range(m[L.H_BUFFERS], m[L.H_BUFFERS_END], L.B_COLUMNS):
        if m[b + L.B_LOADS] < 0:
            continue
        size = m[b + L.B_BYTES]
        p = m[b + L.B_PRODUCER]
        _, q = made_around(m, b, p)
        last, _ = reads_around(m, b, q - 1)
        end = max(p, last)
        now = m[b + L.B_HOLD] if end < m[b + L.B_HOLD] < q else end
        copied, stall = m[b + L.B_COPIED], m[b + L.B_STALL]
        s = end
        while s + 1 < q and m[clocks + (s + 1) * L.C_COLUMNS + L.C_NOW] - (stall if s >= now else 0) < copied:
            s += 1
        if s > now and max_range(m, now + 1, s) + size > budget:
            latest, s = s, now
            while s < latest and value(m, s + 1) + size <= budget:
                s += 1
        if s != now or m[b + L.B_HOLD] != (s if s > end else -1):
            if not hold(m, b, s if s > end else int(MINUS)):
                return False
    return True


@apart
def tighten(m: Words, budget: int, rounds: int) -> None:
    """Time loads and holds; what makes nothing better is undone."""
    if m[L.H_LOADS] == 0:
        return
    for _ in range(rounds):
        before = makespan(m)
        mark = m[L.H_JOURNAL]
        fine = shift_holds(m, budget) and shift_loads(m, budget)
        after = makespan(m)
        if not fine or after > before or m[m[L.H_TOP] + 1] > budget:
            undo(m, mark)
            return
        if after == before:
            return
