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

from ebbtide.planners.search.jit import Words, apart, inner
from ebbtide.planners.search.layout import (
    B_BYTES,
    B_COLUMNS,
    B_ENDS,
    B_HOLD,
    B_LOADS,
    B_NEXT_HOLD,
    B_PINNED,
    B_PRODUCER,
    B_READ,
    B_READ_END,
    B_STAMP,
    B_STEP,
    B_STORED,
    B_TIER,
    H_BEST_AT,
    H_BEST_COUNT,
    H_BEST_HOLDS,
    H_BETWEEN,
    H_BOUNDARY,
    H_BUFFERS,
    H_BUFFERS_END,
    H_COST,
    H_FREE,
    H_HIGH,
    H_JOURNAL,
    H_JOURNAL_AT,
    H_JOURNAL_ROWS,
    H_LEFT,
    H_LOADS,
    H_NODES,
    H_OPS,
    H_RERUNS,
    H_STALE,
    H_STAMP,
    H_STEPS_AT,
    H_TOUCHED,
    H_TOUCHED_AT,
    H_WORK,
    J_ADDED,
    J_HELD,
    J_LOADED,
    J_LOCAL,
    J_REMOVED,
    J_UNLOADED,
    JOURNAL_RESERVE,
    N_COLUMNS,
    N_IN_STAGE,
    N_OF_OP,
    N_OP,
    N_STAGE,
    OP_COST,
    OP_IN,
    OP_IN_END,
    OP_LIMIT,
    OP_MADE,
    OP_OUT,
    OP_OUT_END,
    OP_REACH,
    OP_REMADE,
    OP_STATE,
    OP_WORKSPACE,
    S_DIRTY,
    S_HEAD,
    S_HOLDS,
    S_LOADS,
    S_LOCAL,
    at,
)
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
        stage = m[v + N_STAGE]
        if stage > t:
            return before, stage
        before = stage
        v = m[v + N_OF_OP]
    return before, m[H_OPS] + 1


@inner
def made_around(m: Words, b: int, t: int) -> tuple[int, int]:
    """The last production of ``b`` at a stage ``<= t`` (-1: none) and the first after ``t`` (``n + 1``: none)."""
    before, after = runs_around(m, m[b + B_PRODUCER], t)
    v = m[b + B_LOADS]
    while v >= 0:
        stage = m[v + N_STAGE]
        if stage > t:
            after = min(after, stage)
            break
        before = max(before, stage)
        v = m[v + N_OF_OP]
    return before, after


@inner
def reads_around(m: Words, b: int, t: int) -> tuple[int, int]:
    """The last stage ``<= t`` that reads buffer ``b`` (-1: none) and the first after ``t`` (``n + 1``: none)."""
    before, after = -1, m[H_OPS] + 1
    for i in range(m[b + B_READ], m[b + B_READ_END]):
        left, right = runs_around(m, m[i], t)
        before = max(before, left)
        after = min(after, right)
    return before, after


@inner
def uses_around(m: Words, b: int, t: int) -> tuple[int, int]:
    """The last read or hold of ``b`` at a stage ``<= t`` (-1: none) and the first after ``t`` (``n + 1``: none)."""
    before, after = reads_around(m, b, t)
    stage = m[b + B_HOLD]
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
    m[H_STALE] = min(m[H_STALE], t)
    if m[at(t) + S_DIRTY] == 0:
        m[at(t) + S_DIRTY] = 1
        m[m[H_TOUCHED_AT] + m[H_TOUCHED]] = t
        m[H_TOUCHED] += 1


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
    while m[m[word] + N_STAGE] != t:
        word = m[word] + N_OF_OP
    v = m[word]
    m[word] = m[v + N_OF_OP]
    return v


@inner
def fresh_row(m: Words, what: int, t: int) -> int:
    """A row for a rerun or a load at stage ``t``; there is one."""
    v = m[H_FREE]
    m[H_FREE] = m[v + N_IN_STAGE]
    m[H_HIGH] = max(m[H_HIGH], v + N_COLUMNS)
    m[v + N_OP], m[v + N_STAGE] = what, t
    return v


@inner
def free_row(m: Words, v: int) -> None:
    """Give a row back."""
    m[v + N_OP] = -1
    m[v + N_IN_STAGE] = m[H_FREE]
    m[H_FREE] = v


@inner
def link(m: Words, o: int, t: int) -> None:
    """Put a rerun into both of its lists."""
    v = fresh_row(m, o, t)
    put_in(m, at(o) + N_OF_OP, v, N_OF_OP, N_STAGE)
    put_in(m, at(t) + S_HEAD, v, N_IN_STAGE, N_OP)


@inner
def unlink(m: Words, o: int, t: int) -> None:
    """Take a rerun out of both of its lists."""
    v = take_stage(m, at(o) + N_OF_OP, t)
    take_out(m, at(t) + S_HEAD, v, N_IN_STAGE)
    free_row(m, v)


@inner
def split(m: Words, b: int, t: int, before: int, after: int, sign: int) -> None:
    """Through bytes of ``b`` when a production at ``t``, not in the lists, comes or goes between two others."""
    end = end_of(m, b, before, after)
    if end >= t:
        last, _ = uses_around(m, b, t - 1)
        last = max(last, before)
        touch(m, last)
        add_range(m, max(last, before + 1), min(t, end - 1), -sign * m[b + B_BYTES])


@apart
def change(m: Words, o: int, t: int, sign: int) -> None:
    """Add (``sign`` 1) or take away (-1) the rerun of ``o`` at ``t``; through bytes follow, locals are touched."""
    row = at(o)
    if sign < 0:
        unlink(m, o, t)
    touch(m, t)
    before, after = runs_around(m, o, t)
    for i in range(m[row + OP_OUT], m[row + OP_OUT_END]):
        b = m[i]
        if m[b + B_PINNED] == 0:
            made, following = made_around(m, b, t) if m[b + B_LOADS] >= 0 else (before, after)
            split(m, b, t, made, following, sign)
    for i in range(m[row + OP_IN], m[row + OP_IN_END]):
        b = m[i]
        if m[b + B_PINNED] == 0:
            producer = m[b + B_PRODUCER]
            made, following = made_around(m, b, t)
            end = end_of(m, b, made, following)
            if end < t:
                touch(m, end)
                add_range(m, max(end, made + 1), t - 1, sign * m[b + B_BYTES])
            m[at(producer) + OP_REACH] = max(m[at(producer) + OP_REACH], t)
    if m[row + OP_STATE] > 0:
        last = o
        v = m[row + N_OF_OP]
        while v >= 0:
            last = m[v + N_STAGE]
            v = m[v + N_OF_OP]
        if last < t:
            touch(m, last)
            add_range(m, max(last, o + 1), t - 1, sign * m[row + OP_STATE])
    if sign > 0:
        link(m, o, t)
    m[H_COST] += sign * m[row + OP_COST]
    m[H_RERUNS] += sign


@apart
def local_bytes(m: Words, t: int) -> int:
    """The most bytes at any run of stage ``t`` without those that pass through (definition 4)."""
    if t >= m[H_OPS]:
        return m[H_BETWEEN] if t == m[H_BOUNDARY] else 0
    m[H_STAMP] += 1
    stamp, steps = m[H_STAMP], m[H_STEPS_AT]
    live = 0
    v = m[at(t) + S_HEAD]
    step = 0
    while True:  # which buffers end in this stage, and at which step
        o = m[v + N_OP]
        row = at(o)
        for i in range(m[row + OP_IN], m[row + OP_IN_END]):
            b = m[i]
            if m[b + B_PINNED] == 1:
                continue
            if m[b + B_STAMP] != stamp:
                m[b + B_STAMP] = stamp
                made, following = made_around(m, b, t)
                _, use = uses_around(m, b, t)
                ends = use >= following
                m[b + B_ENDS] = ends
                if ends and made < t:
                    live += m[b + B_BYTES]
            m[b + B_STEP] = step
        if m[row + OP_STATE] > 0 and o < t and m[v + N_OF_OP] < 0:
            live += m[row + OP_STATE]
        m[steps + step] = v
        step += 1
        if o == t:
            break
        v = m[v + N_IN_STAGE]
    b = m[at(t) + S_HOLDS]
    while b >= 0:
        if m[b + B_STAMP] != stamp:
            m[b + B_STAMP] = stamp
            made, following = made_around(m, b, t)
            _, use = uses_around(m, b, t)
            if use >= following and made < t:
                live += m[b + B_BYTES]
        m[b + B_STEP] = step - 1
        b = m[b + B_NEXT_HOLD]
    # The boundary comes before the first run of its stage: what ends here is live, and user code's peak.
    m[H_WORK] += step
    most = live + m[H_BETWEEN] if t == m[H_BOUNDARY] else 0
    v = m[at(t) + S_LOADS]
    while v >= 0:
        live += m[B_BYTES - m[v + N_OP]]
        v = m[v + N_IN_STAGE]
    for k in range(step):
        v = m[steps + k]
        o = m[v + N_OP]
        row = at(o)
        during = live + m[row + OP_WORKSPACE] + (m[row + OP_MADE] if o == t else m[row + OP_REMADE])
        if m[row + OP_STATE] > 0 and (o < t or m[v + N_OF_OP] >= 0):
            during += m[row + OP_STATE]
        most = max(most, during)
        if k + 1 == step:
            break
        for i in range(m[row + OP_OUT], m[row + OP_OUT_END]):
            b = m[i]
            if m[b + B_PINNED] == 1:
                continue
            if m[b + B_STAMP] == stamp:
                live += m[b + B_BYTES]
            else:
                _, following = made_around(m, b, t)
                _, use = uses_around(m, b, t)
                if use < following:
                    live += m[b + B_BYTES]
        for i in range(m[row + OP_IN], m[row + OP_IN_END]):
            b = m[i]
            if m[b + B_PINNED] == 0 and m[b + B_STEP] == k and m[b + B_ENDS] == 1:
                live -= m[b + B_BYTES]
        if m[row + OP_STATE] > 0 and m[v + N_OF_OP] < 0:
            live -= m[row + OP_STATE]
    return most


@inner
def set_local(m: Words, t: int, amount: int) -> None:
    """Give stage ``t`` new local bytes."""
    add_range(m, t, t, amount - m[at(t) + S_LOCAL])
    m[at(t) + S_LOCAL] = amount


@apart
def settle(m: Words, journaled: int) -> None:
    """Walk the touched stages again, journaling what changes if asked to (1)."""
    for i in range(m[H_TOUCHED]):
        t = m[m[H_TOUCHED_AT] + i]
        m[at(t) + S_DIRTY] = 0
        amount = local_bytes(m, t)
        if amount != m[at(t) + S_LOCAL]:
            if journaled == 1:
                write(m, int(J_LOCAL), t, m[at(t) + S_LOCAL])
            set_local(m, t, amount)
    m[H_TOUCHED] = 0


@inner
def write(m: Words, kind: int, first: int, second: int) -> None:
    """Append to the journal."""
    k = m[H_JOURNAL_AT] + 3 * m[H_JOURNAL]
    m[k] = kind
    m[k + 1] = first
    m[k + 2] = second
    m[H_JOURNAL] += 1


@inner
def may_run(m: Words, o: int, t: int) -> bool:
    """Whether op ``o`` may be rerun at stage ``t``, does not run there already and a row is left for it."""
    if t <= o or t > m[at(o) + OP_LIMIT] or m[H_FREE] < 0:
        return False
    before, _ = runs_around(m, o, t)
    if before == t:
        return False
    if m[H_LOADS] > 0:
        for i in range(m[at(o) + OP_OUT], m[at(o) + OP_OUT_END]):
            if is_loaded(m, m[i], t):
                return False
    return True


@inner
def is_loaded(m: Words, b: int, t: int) -> bool:
    """Whether there is a load of ``b`` at ``t``."""
    v = m[b + B_LOADS]
    while v >= 0 and m[v + N_STAGE] < t:
        v = m[v + N_OF_OP]
    return v >= 0 and m[v + N_STAGE] == t


@apart
def add_run(m: Words, o: int, t: int) -> bool:
    """Rerun op ``o`` at stage ``t``; false if it may not (``may_run``) or the journal is full."""
    if m[H_JOURNAL] + JOURNAL_RESERVE > m[H_JOURNAL_ROWS] or not may_run(m, o, t):
        return False
    change(m, o, t, int(PLUS))
    write(m, int(J_ADDED), o, t)
    settle(m, int(JOURNALED))
    return True


@apart
def remove_run(m: Words, o: int, t: int) -> bool:
    """Take the rerun of ``o`` at ``t`` away; false if the journal has no room left."""
    if m[H_JOURNAL] + JOURNAL_RESERVE > m[H_JOURNAL_ROWS]:
        return False
    change(m, o, t, int(MINUS))
    write(m, int(J_REMOVED), o, t)
    settle(m, int(JOURNALED))
    return True


@apart
def change_load(m: Words, b: int, t: int, sign: int) -> None:
    """Add (``sign`` 1) or take away (-1) the load of ``b`` at ``t``; through bytes follow, locals are touched."""
    if sign < 0:
        v = take_stage(m, b + B_LOADS, t)
        take_out(m, at(t) + S_LOADS, v, N_IN_STAGE)
        free_row(m, v)
        if m[b + B_LOADS] < 0:
            m[m[b + B_TIER] + H_LEFT] += m[b + B_STORED]
    touch(m, t)
    before, after = made_around(m, b, t)
    split(m, b, t, before, after, sign)
    # It is copied when it is first made: the clocks from there on change.
    m[H_STALE] = min(m[H_STALE], m[b + B_PRODUCER])
    if sign > 0:
        if m[b + B_LOADS] < 0:
            m[m[b + B_TIER] + H_LEFT] -= m[b + B_STORED]
        v = fresh_row(m, -b, t)
        put_in(m, b + B_LOADS, v, N_OF_OP, N_STAGE)
        m[v + N_IN_STAGE] = m[at(t) + S_LOADS]
        m[at(t) + S_LOADS] = v
    m[H_LOADS] += sign


@apart
def change_hold(m: Words, b: int, t: int) -> None:
    """Hold ``b`` until stage ``t`` ends, or no longer than it is read (-1); bytes follow, locals are touched."""
    former = m[b + B_HOLD]
    if former >= 0:
        made, following = made_around(m, b, former)
        end = end_of(m, b, made, following)
        take_out(m, at(former) + S_HOLDS, b, B_NEXT_HOLD)
        m[b + B_HOLD] = -1
        touch(m, former)
        left = end_of(m, b, made, following)
        if left < end:
            touch(m, left)
            add_range(m, max(left, made + 1), end - 1, -m[b + B_BYTES])
    if t >= 0:
        made, following = made_around(m, b, t)
        left = end_of(m, b, made, following)
        m[b + B_HOLD] = t
        m[b + B_NEXT_HOLD] = m[at(t) + S_HOLDS]
        m[at(t) + S_HOLDS] = b
        touch(m, t)
        if left < t:
            touch(m, left)
            add_range(m, max(left, made + 1), t - 1, m[b + B_BYTES])


@inner
def may_load(m: Words, b: int, t: int) -> bool:
    """Whether ``b`` may be loaded at stage ``t``: after it was made, not where it is made, and there is room."""
    if m[b + B_TIER] < 0 or t <= m[b + B_PRODUCER] or t >= m[H_OPS] or m[H_FREE] < 0:
        return False
    if m[b + B_LOADS] < 0 and m[m[b + B_TIER] + H_LEFT] < m[b + B_STORED]:
        return False
    made, _ = made_around(m, b, t)
    return made != t


@apart
def add_load(m: Words, b: int, t: int) -> bool:
    """Load ``b`` at stage ``t``; false if it may not be (``may_load``) or the journal is full."""
    if m[H_JOURNAL] + JOURNAL_RESERVE > m[H_JOURNAL_ROWS] or not may_load(m, b, t):
        return False
    change_load(m, b, t, int(PLUS))
    write(m, int(J_LOADED), b, t)
    settle(m, int(JOURNALED))
    return True


@apart
def remove_load(m: Words, b: int, t: int) -> bool:
    """Take the load of ``b`` at ``t`` away; false if the journal has no room left."""
    if m[H_JOURNAL] + JOURNAL_RESERVE > m[H_JOURNAL_ROWS]:
        return False
    change_load(m, b, t, int(MINUS))
    write(m, int(J_UNLOADED), b, t)
    settle(m, int(JOURNALED))
    return True


@apart
def hold(m: Words, b: int, t: int) -> bool:
    """Hold ``b`` until stage ``t`` ends, or no longer than it is read (-1); false if the journal has no room left."""
    if m[H_JOURNAL] + JOURNAL_RESERVE > m[H_JOURNAL_ROWS]:
        return False
    write(m, int(J_HELD), b, m[b + B_HOLD])
    change_hold(m, b, t)
    settle(m, int(JOURNALED))
    return True


@apart
def undo(m: Words, mark: int) -> None:
    """Take back everything journaled since the journal had ``mark`` rows."""
    k = m[H_JOURNAL]
    while k > mark:
        k -= 1
        row = m[H_JOURNAL_AT] + 3 * k
        kind, first, second = m[row], m[row + 1], m[row + 2]
        if kind == J_LOCAL:
            set_local(m, first, second)
        elif kind <= J_REMOVED:
            change(m, first, second, int(MINUS) if kind == J_ADDED else int(PLUS))
        elif kind == J_HELD:
            change_hold(m, first, second)
        else:
            change_load(m, first, second, int(MINUS) if kind == J_LOADED else int(PLUS))
    for i in range(m[H_TOUCHED]):
        m[at(m[m[H_TOUCHED_AT] + i]) + S_DIRTY] = 0
    m[H_TOUCHED] = 0
    m[H_JOURNAL] = mark


@apart
def rebuild_locals(m: Words) -> None:
    """Walk every stage: after the static through bytes were laid down."""
    for t in range(m[H_OPS] + 1):
        set_local(m, t, local_bytes(m, t))


@apart
def save_best(m: Words) -> None:
    """Copy the reruns, loads and holds into the place of the best."""
    count = 0
    for v in range(m[H_NODES], m[H_HIGH], N_COLUMNS):
        if m[v + N_OP] != -1:
            m[m[H_BEST_AT] + 2 * count] = m[v + N_OP]
            m[m[H_BEST_AT] + 2 * count + 1] = m[v + N_STAGE]
            count += 1
    m[H_BEST_COUNT] = count
    if m[H_LOADS] > 0:
        for b in range(m[H_BUFFERS], m[H_BUFFERS_END], B_COLUMNS):
            m[m[H_BEST_HOLDS] + (b - m[H_BUFFERS]) // B_COLUMNS] = m[b + B_HOLD]


@apart
def load_runs(m: Words, pairs: Words, count: int) -> None:
    """Replace all reruns by the first ``count`` pairs of words (op, stage), all loads and holds by none.

    The journal is emptied.

    Stages are walked once at the end, not at each change: a stage of a deep chain has hundreds of runs.
    """
    m[H_JOURNAL] = 0
    for b in range(m[H_BUFFERS], m[H_BUFFERS_END], B_COLUMNS):
        if m[b + B_HOLD] >= 0:
            change_hold(m, b, int(MINUS))
        while m[b + B_LOADS] >= 0:
            change_load(m, b, m[m[b + B_LOADS] + N_STAGE], int(MINUS))
    for v in range(m[H_NODES], m[H_HIGH], N_COLUMNS):
        if m[v + N_OP] >= 0:
            change(m, m[v + N_OP], m[v + N_STAGE], int(MINUS))
    for o in range(m[H_OPS]):
        m[at(o) + OP_REACH] = 0
    for b in range(m[H_BUFFERS], m[H_BUFFERS_END], B_COLUMNS):
        for i in range(m[b + B_READ], m[b + B_READ_END]):
            if m[b + B_PINNED] == 0:
                o = m[b + B_PRODUCER]
                m[at(o) + OP_REACH] = max(m[at(o) + OP_REACH], m[i])
    for i in range(count):
        o, t = pairs[2 * i], pairs[2 * i + 1]
        if may_run(m, o, t):
            change(m, o, t, int(PLUS))
    settle(m, int(NOT_JOURNALED))
