"""The interval state, compiled: a set of runs, and the bytes of every stage as an exact function of it.

Definitions:
1. *Stage* ``t`` (``0 <= t < n``) is the reruns placed before the first run of op ``t``, ascending by op, each op
   at most once, and then that first run. Stage ``n`` is the end of the step: no run, only what is left.
2. The state is a set of reruns ``(op, stage)`` with ``stage > op``. Any such set is legal as long as the op may
   run there (``OP_LIMIT``): a read at stage ``t`` uses the last production at a stage ``<= t``.
3. The *interval* of a production at ``p`` is ``[p, e]``: ``e`` is the last stage below the next production that
   reads the buffer, or ``p``. A pinned buffer has one interval, from its first run to stage ``n`` included; that
   of a mutation, which nobody reads, ends where the boundary begins.
4. Bytes of stage ``t`` = *through* (intervals with ``p < t < e``, by range additions) + *local* (a walk over the
   runs of the stage: while an op runs live bytes, its workspace and all its outputs; after it what is kept).
5. A random op that runs again keeps its generator state from its first run to its last and takes it once more
   during each repeat; it is treated as one more interval.

6. Where buffers may be moved there are two more kinds of rows (``hybrid.choice``). A *load* ``(b, t)`` makes ``b``
   alone at the beginning of stage ``t``, after the boundary and before all runs; its producer does not run there. A
   *hold* ``(b, t)``, at most one per buffer, is a read of ``b`` when stage ``t`` ends.

Because the bytes depend on the set alone, undoing a change is making the opposite change. The journal records
runs and the locals that they overwrote, so that undoing walks no stage a second time.
"""

from __future__ import annotations

from ebbtide.planners.search import layout as L
from ebbtide.planners.search.jit import Words, apart, inner
from ebbtide.planners.search.layout import at
from ebbtide.planners.search.segment_tree import add_range

__all__ = [
    "add_load",
    "add_run",
    "hold",
    "load_runs",
    "rebuild_locals",
    "remove_load",
    "remove_run",
    "save_best",
    "undo",
]

JOURNALED, NOT_JOURNALED = 1, 0
PLUS, MINUS = 1, -1  # passed as int(PLUS): numba would compile a function anew for each literal argument


@inner
def runs_around(m: Words, o: int, t: int) -> tuple[int, int]:
    """The last run of op ``o`` at a stage ``<= t`` (-1: none) and the first after ``t`` (``n + 1``: none)."""
    before = -1
    v = at(o)
    while v >= 0:
        stage = m[v + L.N_STAGE]
        if stage > t:
            return before, stage
        before = stage
        v = m[v + L.N_OF_OP]
    return before, m[L.H_OPS] + 1


@inner
def made_around(m: Words, b: int, t: int) -> tuple[int, int]:
    """The last production of ``b`` at a stage ``<= t`` (-1: none) and the first after ``t`` (``n + 1``: none)."""
    before, after = runs_around(m, m[b + L.B_PRODUCER], t)
    v = m[b + L.B_LOADS]
    while v >= 0:
        stage = m[v + L.N_STAGE]
        if stage > t:
            after = min(after, stage)
            break
        before = max(before, stage)
        v = m[v + L.N_OF_OP]
    return before, after


@inner
def reads_around(m: Words, b: int, t: int) -> tuple[int, int]:
    """The last stage ``<= t`` that reads buffer ``b`` (-1: none) and the first after ``t`` (``n + 1``: none)."""
    before, after = -1, m[L.H_OPS] + 1
    for i in range(m[b + L.B_READ], m[b + L.B_READ_END]):
        left, right = runs_around(m, m[i], t)
        before = max(before, left)
        after = min(after, right)
    return before, after


@inner
def uses_around(m: Words, b: int, t: int) -> tuple[int, int]:
    """The last read or hold of ``b`` at a stage ``<= t`` (-1: none) and the first after ``t`` (``n + 1``: none)."""
    before, after = reads_around(m, b, t)
    stage = m[b + L.B_HOLD]
    if stage > t:
        after = min(after, stage)
    else:
        before = max(before, stage)
    return before, after


@inner
def end_of(m: Words, b: int, p: int, q: int) -> int:
    """The end of the interval of ``b`` made at ``p`` when the next production is at ``q`` (definition 3)."""
    last, _ = uses_around(m, b, q - 1)
    return max(last, p)


@inner
def touch(m: Words, t: int) -> None:
    """Note that the local bytes of stage ``t`` are to be walked again, and the clocks of later ones."""
    m[L.H_STALE] = min(m[L.H_STALE], t)
    if m[at(t) + L.S_DIRTY] == 0:
        m[at(t) + L.S_DIRTY] = 1
        m[m[L.H_TOUCHED_AT] + m[L.H_TOUCHED]] = t
        m[L.H_TOUCHED] += 1


@inner
def put_in(m: Words, word: int, v: int, following: int, key: int) -> None:
    """Put row ``v`` into the list that begins at ``word``, ascending by column ``key``."""
    while m[word] >= 0 and m[m[word] + key] < m[v + key]:
        word = m[word] + following
    m[v + following] = m[word]
    m[word] = v


@inner
def take_out(m: Words, word: int, v: int, following: int) -> None:
    """Take row ``v`` out of the list that begins at ``word``."""
    while m[word] != v:
        word = m[word] + following
    m[word] = m[v + following]


@inner
def take_stage(m: Words, word: int, t: int) -> int:
    """Take the row of stage ``t`` out of the list that begins at ``word``, ascending by stage; that row."""
    while m[m[word] + L.N_STAGE] != t:
        word = m[word] + L.N_OF_OP
    v = m[word]
    m[word] = m[v + L.N_OF_OP]
    return v


@inner
def fresh_row(m: Words, what: int, t: int) -> int:
    """A row for a rerun or a load at stage ``t``; there is one."""
    v = m[L.H_FREE]
    m[L.H_FREE] = m[v + L.N_IN_STAGE]
    m[L.H_HIGH] = max(m[L.H_HIGH], v + L.N_COLUMNS)
    m[v + L.N_OP], m[v + L.N_STAGE] = what, t
    return v


@inner
def free_row(m: Words, v: int) -> None:
    """Give a row back."""
    m[v + L.N_OP] = -1
    m[v + L.N_IN_STAGE] = m[L.H_FREE]
    m[L.H_FREE] = v


@inner
def link(m: Words, o: int, t: int) -> None:
    """Put a rerun into both of its lists."""
    v = fresh_row(m, o, t)
    put_in(m, at(o) + L.N_OF_OP, v, L.N_OF_OP, L.N_STAGE)
    put_in(m, at(t) + L.S_HEAD, v, L.N_IN_STAGE, L.N_OP)


@inner
def unlink(m: Words, o: int, t: int) -> None:
    """Take a rerun out of both of its lists."""
    v = take_stage(m, at(o) + L.N_OF_OP, t)
    take_out(m, at(t) + L.S_HEAD, v, L.N_IN_STAGE)
    free_row(m, v)


@inner
def split(m: Words, b: int, t: int, before: int, after: int, sign: int) -> None:
    """Through bytes of ``b`` when a production at ``t``, not in the lists, comes or goes between two others."""
    end = end_of(m, b, before, after)
    if end >= t:
        last, _ = uses_around(m, b, t - 1)
        last = max(last, before)
        touch(m, last)
        add_range(m, max(last, before + 1), min(t, end - 1), -sign * m[b + L.B_BYTES])


@apart
def change(m: Words, o: int, t: int, sign: int) -> None:
    """Add (``sign`` 1) or take away (-1) the rerun of ``o`` at ``t``; through bytes follow, locals are touched."""
    row = at(o)
    if sign < 0:
        unlink(m, o, t)
    touch(m, t)
    before, after = runs_around(m, o, t)
    for i in range(m[row + L.OP_OUT], m[row + L.OP_OUT_END]):
        b = m[i]
        if m[b + L.B_PINNED] == 0:
            made, following = made_around(m, b, t) if m[b + L.B_LOADS] >= 0 else (before, after)
            split(m, b, t, made, following, sign)
    for i in range(m[row + L.OP_IN], m[row + L.OP_IN_END]):
        b = m[i]
        if m[b + L.B_PINNED] == 0:
            producer = m[b + L.B_PRODUCER]
            made, following = made_around(m, b, t)
            end = end_of(m, b, made, following)
            if end < t:
                touch(m, end)
                add_range(m, max(end, made + 1), t - 1, sign * m[b + L.B_BYTES])
            m[at(producer) + L.OP_REACH] = max(m[at(producer) + L.OP_REACH], t)
    if m[row + L.OP_STATE] > 0:
        last = o
        v = m[row + L.N_OF_OP]
        while v >= 0:
            last = m[v + L.N_STAGE]
            v = m[v + L.N_OF_OP]
        if last < t:
            touch(m, last)
            add_range(m, max(last, o + 1), t - 1, sign * m[row + L.OP_STATE])
    if sign > 0:
        link(m, o, t)
    m[L.H_COST] += sign * m[row + L.OP_COST]
    m[L.H_RERUNS] += sign


@apart
def local_bytes(m: Words, t: int) -> int:
    """The most bytes at any run of stage ``t`` without those that pass through (definition 4)."""
    if t >= m[L.H_OPS]:
        return m[L.H_BETWEEN] if t == m[L.H_BOUNDARY] else 0
    m[L.H_STAMP] += 1
    stamp, steps = m[L.H_STAMP], m[L.H_STEPS_AT]
    live = 0
    v = m[at(t) + L.S_HEAD]
    step = 0
    while True:  # which buffers end in this stage, and at which step
        o = m[v + L.N_OP]
        row = at(o)
        for i in range(m[row + L.OP_IN], m[row + L.OP_IN_END]):
            b = m[i]
            if m[b + L.B_PINNED] == 1:
                continue
            if m[b + L.B_STAMP] != stamp:
                m[b + L.B_STAMP] = stamp
                made, following = made_around(m, b, t)
                _, use = uses_around(m, b, t)
                ends = use >= following
                m[b + L.B_ENDS] = ends
                if ends and made < t:
                    live += m[b + L.B_BYTES]
            m[b + L.B_STEP] = step
        if m[row + L.OP_STATE] > 0 and o < t and m[v + L.N_OF_OP] < 0:
            live += m[row + L.OP_STATE]
        m[steps + step] = v
        step += 1
        if o == t:
            break
        v = m[v + L.N_IN_STAGE]
    b = m[at(t) + L.S_HOLDS]
    while b >= 0:
        if m[b + L.B_STAMP] != stamp:
            m[b + L.B_STAMP] = stamp
            made, following = made_around(m, b, t)
            _, use = uses_around(m, b, t)
            if use >= following and made < t:
                live += m[b + L.B_BYTES]
        m[b + L.B_STEP] = step - 1
        b = m[b + L.B_NEXT_HOLD]
    # The boundary comes before the first run of its stage: what ends here is live, and user code's peak.
    m[L.H_WORK] += step
    most = live + m[L.H_BETWEEN] if t == m[L.H_BOUNDARY] else 0
    v = m[at(t) + L.S_LOADS]
    while v >= 0:
        live += m[L.B_BYTES - m[v + L.N_OP]]
        v = m[v + L.N_IN_STAGE]
    for k in range(step):
        v = m[steps + k]
        o = m[v + L.N_OP]
        row = at(o)
        during = live + m[row + L.OP_WORKSPACE] + (m[row + L.OP_MADE] if o == t else m[row + L.OP_REMADE])
        if m[row + L.OP_STATE] > 0 and (o < t or m[v + L.N_OF_OP] >= 0):
            during += m[row + L.OP_STATE]
        most = max(most, during)
        if k + 1 == step:
            break
        for i in range(m[row + L.OP_OUT], m[row + L.OP_OUT_END]):
            b = m[i]
            if m[b + L.B_PINNED] == 1:
                continue
            if m[b + L.B_STAMP] == stamp:
                live += m[b + L.B_BYTES]
            else:
                _, following = made_around(m, b, t)
                _, use = uses_around(m, b, t)
                if use < following:
                    live += m[b + L.B_BYTES]
        for i in range(m[row + L.OP_IN], m[row + L.OP_IN_END]):
            b = m[i]
            if m[b + L.B_PINNED] == 0 and m[b + L.B_STEP] == k and m[b + L.B_ENDS] == 1:
                live -= m[b + L.B_BYTES]
        if m[row + L.OP_STATE] > 0 and m[v + L.N_OF_OP] < 0:
            live -= m[row + L.OP_STATE]
    return most


@inner
def set_local(m: Words, t: int, amount: int) -> None:
    """Give stage ``t`` new local bytes."""
    add_range(m, t, t, amount - m[at(t) + L.S_LOCAL])
    m[at(t) + L.S_LOCAL] = amount


@apart
def settle(m: Words, journaled: int) -> None:
    """Walk the touched stages again, journaling what changes if asked to (1)."""
    for i in range(m[L.H_TOUCHED]):
        t = m[m[L.H_TOUCHED_AT] + i]
        m[at(t) + L.S_DIRTY] = 0
        amount = local_bytes(m, t)
        if amount != m[at(t) + L.S_LOCAL]:
            if journaled == 1:
                write(m, int(L.J_LOCAL), t, m[at(t) + L.S_LOCAL])
            set_local(m, t, amount)
    m[L.H_TOUCHED] = 0


@inner
def write(m: Words, kind: int, first: int, second: int) -> None:
    """Append to the journal."""
    k = m[L.H_JOURNAL_AT] + 3 * m[L.H_JOURNAL]
    m[k] = kind
    m[k + 1] = first
    m[k + 2] = second
    m[L.H_JOURNAL] += 1


@inner
def may_run(m: Words, o: int, t: int) -> bool:
    """Whether op ``o`` may be rerun at stage ``t``, does not run there already and a row is left for it."""
    if t <= o or t > m[at(o) + L.OP_LIMIT] or m[L.H_FREE] < 0:
        return False
    before, _ = runs_around(m, o, t)
    if before == t:
        return False
    if m[L.H_LOADS] > 0:
        for i in range(m[at(o) + L.OP_OUT], m[at(o) + L.OP_OUT_END]):
            if is_loaded(m, m[i], t):
                return False
    return True


@inner
def is_loaded(m: Words, b: int, t: int) -> bool:
    """Whether there is a load of ``b`` at ``t``."""
    v = m[b + L.B_LOADS]
    while v >= 0 and m[v + L.N_STAGE] < t:
        v = m[v + L.N_OF_OP]
    return v >= 0 and m[v + L.N_STAGE] == t


@apart
def add_run(m: Words, o: int, t: int) -> bool:
    """Rerun op ``o`` at stage ``t``; false if it may not (``may_run``) or the journal is full."""
    if m[L.H_JOURNAL] + L.JOURNAL_RESERVE > m[L.H_JOURNAL_ROWS] or not may_run(m, o, t):
        return False
    change(m, o, t, int(PLUS))
    write(m, int(L.J_ADDED), o, t)
    settle(m, int(JOURNALED))
    return True


@apart
def remove_run(m: Words, o: int, t: int) -> bool:
    """Take the rerun of ``o`` at ``t`` away; false if the journal has no room left."""
    if m[L.H_JOURNAL] + L.JOURNAL_RESERVE > m[L.H_JOURNAL_ROWS]:
        return False
    change(m, o, t, int(MINUS))
    write(m, int(L.J_REMOVED), o, t)
    settle(m, int(JOURNALED))
    return True


@apart
def change_load(m: Words, b: int, t: int, sign: int) -> None:
    """Add (``sign`` 1) or take away (-1) the load of ``b`` at ``t``; through bytes follow, locals are touched."""
    if sign < 0:
        v = take_stage(m, b + L.B_LOADS, t)
        take_out(m, at(t) + L.S_LOADS, v, L.N_IN_STAGE)
        free_row(m, v)
        if m[b + L.B_LOADS] < 0:
            m[m[b + L.B_TIER] + L.H_LEFT] += m[b + L.B_STORED]
    touch(m, t)
    before, after = made_around(m, b, t)
    split(m, b, t, before, after, sign)
    # It is copied when it is first made: the clocks from there on change.
    m[L.H_STALE] = min(m[L.H_STALE], m[b + L.B_PRODUCER])
    if sign > 0:
        if m[b + L.B_LOADS] < 0:
            m[m[b + L.B_TIER] + L.H_LEFT] -= m[b + L.B_STORED]
        v = fresh_row(m, -b, t)
        put_in(m, b + L.B_LOADS, v, L.N_OF_OP, L.N_STAGE)
        m[v + L.N_IN_STAGE] = m[at(t) + L.S_LOADS]
        m[at(t) + L.S_LOADS] = v
    m[L.H_LOADS] += sign


@apart
def change_hold(m: Words, b: int, t: int) -> None:
    """Hold ``b`` until stage ``t`` ends, or no longer than it is read (-1); bytes follow, locals are touched."""
    former = m[b + L.B_HOLD]
    if former >= 0:
        made, following = made_around(m, b, former)
        end = end_of(m, b, made, following)
        take_out(m, at(former) + L.S_HOLDS, b, L.B_NEXT_HOLD)
        m[b + L.B_HOLD] = -1
        touch(m, former)
        left = end_of(m, b, made, following)
        if left < end:
            touch(m, left)
            add_range(m, max(left, made + 1), end - 1, -m[b + L.B_BYTES])
    if t >= 0:
        made, following = made_around(m, b, t)
        left = end_of(m, b, made, following)
        m[b + L.B_HOLD] = t
        m[b + L.B_NEXT_HOLD] = m[at(t) + L.S_HOLDS]
        m[at(t) + L.S_HOLDS] = b
        touch(m, t)
        if left < t:
            touch(m, left)
            add_range(m, max(left, made + 1), t - 1, m[b + L.B_BYTES])


@inner
def may_load(m: Words, b: int, t: int) -> bool:
    """Whether ``b`` may be loaded at stage ``t``: after it was made, not where it is made, and there is room."""
    if m[b + L.B_TIER] < 0 or t <= m[b + L.B_PRODUCER] or t >= m[L.H_OPS] or m[L.H_FREE] < 0:
        return False
    if m[b + L.B_LOADS] < 0 and m[m[b + L.B_TIER] + L.H_LEFT] < m[b + L.B_STORED]:
        return False
    made, _ = made_around(m, b, t)
    return made != t


@apart
def add_load(m: Words, b: int, t: int) -> bool:
    """Load ``b`` at stage ``t``; false if it may not be (``may_load``) or the journal is full."""
    if m[L.H_JOURNAL] + L.JOURNAL_RESERVE > m[L.H_JOURNAL_ROWS] or not may_load(m, b, t):
        return False
    change_load(m, b, t, int(PLUS))
    write(m, int(L.J_LOADED), b, t)
    settle(m, int(JOURNALED))
    return True


@apart
def remove_load(m: Words, b: int, t: int) -> bool:
    """Take the load of ``b`` at ``t`` away; false if the journal has no room left."""
    if m[L.H_JOURNAL] + L.JOURNAL_RESERVE > m[L.H_JOURNAL_ROWS]:
        return False
    change_load(m, b, t, int(MINUS))
    write(m, int(L.J_UNLOADED), b, t)
    settle(m, int(JOURNALED))
    return True


@apart
def hold(m: Words, b: int, t: int) -> bool:
    """Hold ``b`` until stage ``t`` ends, or no longer than it is read (-1); false if the journal has no room left."""
    if m[L.H_JOURNAL] + L.JOURNAL_RESERVE > m[L.H_JOURNAL_ROWS]:
        return False
    write(m, int(L.J_HELD), b, m[b + L.B_HOLD])
    change_hold(m, b, t)
    settle(m, int(JOURNALED))
    return True


@apart
def undo(m: Words, mark: int) -> None:
    """Take back everything journaled since the journal had ``mark`` rows."""
    k = m[L.H_JOURNAL]
    while k > mark:
        k -= 1
        row = m[L.H_JOURNAL_AT] + 3 * k
        kind, first, second = m[row], m[row + 1], m[row + 2]
        if kind == L.J_LOCAL:
            set_local(m, first, second)
        elif kind <= L.J_REMOVED:
            change(m, first, second, int(MINUS) if kind == L.J_ADDED else int(PLUS))
        elif kind == L.J_HELD:
            change_hold(m, first, second)
        else:
            change_load(m, first, second, int(MINUS) if kind == L.J_LOADED else int(PLUS))
    for i in range(m[L.H_TOUCHED]):
        m[at(m[m[L.H_TOUCHED_AT] + i]) + L.S_DIRTY] = 0
    m[L.H_TOUCHED] = 0
    m[L.H_JOURNAL] = mark


@apart
def rebuild_locals(m: Words) -> None:
    """Walk every stage: after the static through bytes were laid down."""
    for t in range(m[L.H_OPS] + 1):
        set_local(m, t, local_bytes(m, t))


@apart
def save_best(m: Words) -> None:
    """Copy the reruns, loads and holds into the place of the best."""
    count = 0
    for v in range(m[L.H_NODES], m[L.H_HIGH], L.N_COLUMNS):
        if m[v + L.N_OP] != -1:
            m[m[L.H_BEST_AT] + 2 * count] = m[v + L.N_OP]
            m[m[L.H_BEST_AT] + 2 * count + 1] = m[v + L.N_STAGE]
            count += 1
    m[L.H_BEST_COUNT] = count
    if m[L.H_LOADS] > 0:
        for b in range(m[L.H_BUFFERS], m[L.H_BUFFERS_END], L.B_COLUMNS):
            m[m[L.H_BEST_HOLDS] + (b - m[L.H_BUFFERS]) // L.B_COLUMNS] = m[b + L.B_HOLD]


@apart
def load_runs(m: Words, pairs: Words, count: int) -> None:
    """Replace all reruns by the first ``count`` pairs of words (op, stage), all loads and holds by none.

    The journal is emptied.

    Stages are walked once at the end, not at each change: a stage of a deep chain has hundreds of runs.
    """
    m[L.H_JOURNAL] = 0
    for b in range(m[L.H_BUFFERS], m[L.H_BUFFERS_END], L.B_COLUMNS):
        if m[b + L.B_HOLD] >= 0:
            change_hold(m, b, int(MINUS))
        while m[b + L.B_LOADS] >= 0:
            change_load(m, b, m[m[b + L.B_LOADS] + L.N_STAGE], int(MINUS))
    for v in range(m[L.H_NODES], m[L.H_HIGH], L.N_COLUMNS):
        if m[v + L.N_OP] >= 0:
            change(m, m[v + L.N_OP], m[v + L.N_STAGE], int(MINUS))
    for o in range(m[L.H_OPS]):
        m[at(o) + L.OP_REACH] = 0
    for b in range(m[L.H_BUFFERS], m[L.H_BUFFERS_END], L.B_COLUMNS):
        for i in range(m[b + L.B_READ], m[b + L.B_READ_END]):
            if m[b + L.B_PINNED] == 0:
                o = m[b + L.B_PRODUCER]
                m[at(o) + L.OP_REACH] = max(m[at(o) + L.OP_REACH], m[i])
    for i in range(count):
        o, t = pairs[2 * i], pairs[2 * i + 1]
        if may_run(m, o, t):
            change(m, o, t, int(PLUS))
    settle(m, int(NOT_JOURNALED))
