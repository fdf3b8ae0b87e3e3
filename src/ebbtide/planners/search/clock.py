"""The time of an interval state with loads and holds, compiled: lanes, waits and the makespan.

It is the simulator's clock, walked stage by stage over the schedule of a choice (``hybrid.choice``), in whole units of
cost. What happens in stage ``t``, in this order:
1. At the boundary the compute lane waits for all that is under way from a tier.
2. The loads of the stage are issued; each begins when its lane is free and its copy is written.
3. Each run waits for what it reads. After it, the first free of a moved buffer waits for its copy: that is where the
   interval of its first run ends. After the first run, copies of its outputs are issued, and holds end.

Everything before the first stage that changed is as it was: its clocks are kept, and the walk begins there.
"""

from __future__ import annotations

from ebbtide.planners.search import layout as L
from ebbtide.planners.search.interval_kernels import end_of, made_around, reads_around
from ebbtide.planners.search.jit import Words, apart, inner
from ebbtide.planners.search.layout import at

__all__ = ["first_end", "makespan", "objective"]


@inner
def arrival(m: Words, b: int, t: int) -> int:
    """When the copy of ``b`` that stage ``t`` reads is there, if it is loaded; 0 otherwise."""
    ready, loaded = 0, -1
    v = m[b + L.B_LOADS]
    while v >= 0 and m[v + L.N_STAGE] <= t:
        ready, loaded = m[v + L.N_READY], m[v + L.N_STAGE]
        v = m[v + L.N_OF_OP]
    if loaded < 0:
        return 0
    made, _ = made_around(m, b, t)
    return ready if made == loaded else 0


@inner
def first_end(m: Words, b: int) -> int:
    """The stage in which ``b`` is freed for the first time: the end of the interval of its first run."""
    p = m[b + L.B_PRODUCER]
    _, q = made_around(m, b, p)
    return end_of(m, b, p, q)


@inner
def is_read_later(m: Words, b: int, v: int) -> bool:
    """Whether a run of the stage after the one in row ``v`` reads ``b``."""
    t = m[v + L.N_STAGE]
    while m[v + L.N_OP] != t:
        v = m[v + L.N_IN_STAGE]
        row = at(m[v + L.N_OP])
        for i in range(m[row + L.OP_IN], m[row + L.OP_IN_END]):
            if m[i] == b:
                return True
    return False


@apart
def sort_loads(m: Words, t: int) -> None:
    """Order the loads of stage ``t`` by the stage in which they are read first, then by buffer."""
    head = -1
    v = m[at(t) + L.S_LOADS]
    while v >= 0:
        following = m[v + L.N_IN_STAGE]
        b = -m[v + L.N_OP]
        _, read = reads_around(m, b, t - 1)
        before, w = -1, head
        while w >= 0:
            other = -m[w + L.N_OP]
            _, use = reads_around(m, other, t - 1)
            if use > read or (use == read and other > b):
                break
            before, w = w, m[w + L.N_IN_STAGE]
        m[v + L.N_IN_STAGE] = w
        if before < 0:
            head = v
        else:
            m[before + L.N_IN_STAGE] = v
        v = following
    m[at(t) + L.S_LOADS] = head


@inner
def stalled(m: Words, b: int, now: int) -> int:
    """When the compute lane goes on after the first free of ``b``; for how long it waits is noted."""
    copied = m[b + L.B_COPIED]
    m[b + L.B_STALL] = max(copied - now, 0)
    return max(copied, now)


@apart
def makespan(m: Words) -> int:
    """The time of the whole step, after walking the stages from the first that changed."""
    n = m[L.H_OPS]
    t = m[L.H_STALE]
    if t > n:
        return m[L.H_MAKESPAN]
    moved = m[L.H_LOADS] > 0
    clock = m[L.H_CLOCKS] + t * L.C_COLUMNS
    now = m[clock + L.C_NOW]
    while t < n:
        clock = m[L.H_CLOCKS] + t * L.C_COLUMNS
        m[clock + L.C_NOW] = now
        following = clock + L.C_COLUMNS
        for k in range(L.C_ARRIVED, L.C_COLUMNS):
            m[following + k] = m[clock + k]
        if t == m[L.H_BOUNDARY]:
            now = max(now, m[clock + L.C_ARRIVED])
        v = m[at(t) + L.S_LOADS]
        if v >= 0:
            if m[v + L.N_IN_STAGE] >= 0:
                sort_loads(m, t)
                v = m[at(t) + L.S_LOADS]
            while v >= 0:
                b = -m[v + L.N_OP]
                lane = following + m[b + L.B_IN_LANE]
                m[lane] = max(m[lane], now, m[b + L.B_COPIED]) + m[b + L.B_IN]
                m[v + L.N_READY] = m[lane]
                m[following + L.C_ARRIVED] = max(m[following + L.C_ARRIVED], m[lane])
                now += m[b + L.B_IN_SHARE]
                v = m[v + L.N_IN_STAGE]
        v = m[at(t) + L.S_HEAD]
        while True:
            o = m[v + L.N_OP]
            row = at(o)
            if moved:
                for i in range(m[row + L.OP_IN], m[row + L.OP_IN_END]):
                    if m[m[i] + L.B_LOADS] >= 0:
                        now = max(now, arrival(m, m[i], t))
                now += m[row + L.OP_COST]
                for i in range(m[row + L.OP_IN], m[row + L.OP_IN_END]):
                    b = m[i]
                    if m[b + L.B_LOADS] >= 0 and m[b + L.B_HOLD] != t and m[b + L.B_COPIED] + m[b + L.B_STALL] > now:
                        if first_end(m, b) == t and not is_read_later(m, b, v):
                            now = stalled(m, b, now)
            else:
                now += m[row + L.OP_COST]
            if o == t:
                break
            v = m[v + L.N_IN_STAGE]
        if moved:
            row = at(t)
            for i in range(m[row + L.OP_OUT], m[row + L.OP_OUT_END]):
                b = m[i]
                if m[b + L.B_LOADS] >= 0:
                    lane = following + m[b + L.B_OUT_LANE]
                    m[lane] = max(m[lane], now) + m[b + L.B_OUT]
                    m[b + L.B_COPIED] = m[lane]
                    m[b + L.B_STALL] = 0
                    now += m[b + L.B_OUT_SHARE]
                    if first_end(m, b) == t:
                        now = stalled(m, b, now)
            b = m[at(t) + L.S_HOLDS]
            while b >= 0:
                if m[b + L.B_LOADS] >= 0 and first_end(m, b) == t:
                    now = stalled(m, b, now)
                b = m[b + L.B_NEXT_HOLD]
        t += 1
    clock = m[L.H_CLOCKS] + n * L.C_COLUMNS
    m[clock + L.C_NOW] = now
    if n == m[L.H_BOUNDARY]:
        now = max(now, m[clock + L.C_ARRIVED])
    m[L.H_WORK] += (t - m[L.H_STALE]) >> 3
    m[L.H_STALE] = n + 1
    m[L.H_MAKESPAN] = now
    return now


@inner
def objective(m: Words) -> int:
    """What searches minimise: the cost of all reruns, or with tiers the makespan beyond every op once."""
    return makespan(m) - m[L.H_BASE] if m[L.H_TIERS] > 0 else m[L.H_COST]
