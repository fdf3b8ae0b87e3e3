"""A proven lower bound on the overhead of chains at deep budgets, where steps run several times.

Definitions (paths, states, steps and who asks for them: ``find``). Steps are ``1..n``; ``t(j)`` is the first run of
the op that asks for step ``j``, so that ``t(n) <= .. <= t(1)``.
1. A step is *resident* if one of its states is. At ``t(j)`` step ``j`` is, because the op reads its last state.
2. The *room* at ``t(j)`` is the budget less what is resident then whatever the schedule: pinned buffers made before,
   what belongs to user code, the op's workspace and outputs, what it reads off the path or of higher steps, and what
   is read later and cannot be made again.
3. What else is made before ``t(j)`` and read by a first run after it is either in the room or made again in between,
   by an op that costs something. ``price(j, d)`` is the least cost at which ``d`` bytes and the asked-for state fit
   beside what is left of it, where an op may be taken in part. No rerun is counted at two steps: an op counts at
   ``t(j)`` only if what it made is read again before the next step at which it counts; ops of the path never count.
4. ``least(a, p)`` is the size of the smallest state of steps ``a + 1..p``, ``cost(a, p)`` what one run of each of
   their ops costs.

Claim. Take any legal schedule without transfers that runs first computes in captured order, any ``a <= b``, and any
time before ``t(b)`` at which no step of ``a + 1..b`` is resident. If at every ``t(j)``, ``a < j <= b``, at least ``d``
bytes of steps up to ``a`` are resident, then the runs of ops of steps ``a + 1..b`` from that time on, and what is
paid at those ``t(j)`` (3), cost at least ``T(a, b, d)``, where ``T(a, a, d) = 0`` and

    T(a, b, d) = min over p in a + 1..b of  cost(a, p) + T(p, b, d + least(a, p)) + T(a, p - 1, d) + price(p, d).

Proof, by induction on ``b - a``. Let ``p`` be the least number in ``a + 1..b`` such that at every ``t(j)``,
``p < j <= b``, some step of ``a + 1..p`` is resident; ``b`` is such a number.
(i) Steps ``p + 1..b``: at each of their ``t(j)``, at least ``d + least(a, p)`` bytes of steps up to ``p`` are
    resident, and none of them is at the given time: by induction their runs cost at least
    ``T(p, b, d + least(a, p))``.
(ii) At some ``t(j)``, ``p <= j <= b``, no step of ``a + 1..p - 1`` is resident. If ``p = a + 1`` there are none;
    otherwise ``p - 1`` is not a number as above.
(iii) Until then every op of steps ``a + 1..p`` has run since the given time: step ``j`` was not resident and is
    now, so its last state was made in between, and so, down the path, were all states of steps ``a + 1..j``, none of
    which was there (``chains.find``, definition 1). That is ``cost(a, p)``.
(iv) Steps ``a + 1..p - 1`` are not resident at this ``t(j)`` and are asked for later: at the same moment they would
    have to be resident. By induction their runs from there on cost at least ``T(a, p - 1, d)``.
(v) At ``t(p)`` its asked-for state and ``d`` bytes of lower steps are resident, which costs ``price(p, d)``.
The runs in (i), (iii) and (iv) are of different ops or at different times, and so is what is paid: they add up.

At the step's start nothing is resident, so all runs of the path's ops cost at least ``T(0, n, 0)``; one run of each is
part of the unplanned step. On unit chains this is Revolve's recurrence (Griewank & Walther, ACM TOMS 26(1), 2000);
here the room may shrink as gradients fill it, steps cost what they cost, and schedules need hold nothing for long.
Sizes are counted in units and rounded down, and so are costs: both only make the bound smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ebbtide.planners.chains.find import Path, chains_of
from ebbtide.planners.chains.table import COST_UNITS, NO_PLAN, PathTable, Steps, finest
from ebbtide.planners.search.jit import Ints
from ebbtide.step.program import Program

__all__ = ["PathBound", "cost_of_steps", "path_bound", "path_bounds"]

MOST_OPS = 4_000  # of a program: chains that long have tables beyond any limit
MOST_STEPS = 512


@dataclass(frozen=True)
class PathBound:
    """What one path proves.

    Attributes:
        bound: on the overhead, a fraction.
        infeasible: whether no schedule in captured order fits, proven.
        path: that it is about.
    """

    bound: float
    infeasible: bool
    path: Path


def path_bounds(program: Program, budget: int) -> Iterator[PathBound]:
    """The bound of each path along which a program is a chain; none of other programs and very large ones.

    Args:
        program: with costs.
        budget: bytes above the step's start.
    """
    if len(program.ops) <= MOST_OPS:
        bounds = (path_bound(program, budget, path) for path in chains_of(program))
        yield from (each for each in bounds if each is not None)


def path_bound(program: Program, budget: int, path: Path) -> PathBound | None:
    """The bound of one path of any program; ``None`` where its table would be beyond the limits."""
    steps = _steps(program, budget, path)
    if steps is None:
        return None
    if isinstance(steps, bool):
        return PathBound(0.0, steps, path)
    least = PathTable(steps).least
    if least >= NO_PLAN:
        return PathBound(0.0, True, path)
    return PathBound((least - int(steps.cost.sum())) / COST_UNITS, False, path)


def _steps(program: Program, budget: int, path: Path) -> Steps | bool | None:
    """Steps for the table; ``True`` if nothing fits, ``False`` if everything does, ``None`` beyond the limits."""
    count = len(path.steps)
    if count > MOST_STEPS:
        return None
    rooms = [_Room(program, budget, t) for t in path.asked_by]
    place = {b: i for i, b in enumerate(path.states)}
    for room, t, step in zip(rooms, path.asked_by, path.steps, strict=True):
        higher = (b for b in program.ops[t].inputs if place.get(b, -1) > place[step[-1]])
        room.left -= sum(program.buffers[b].bytes for b in higher)
    _share_out(program, path, rooms)
    size = [min(program.buffers[b].bytes for b in step) for step in path.steps]
    asked = [program.buffers[step[-1]].bytes for step in path.steps]
    most = max(room.left for room in rooms)
    if any(room.left < need for room, need in zip(rooms, asked, strict=True)):
        return True
    taken = 0
    for room, least, need in zip(rooms, size, asked, strict=True):
        if room.price(taken + need):
            break
        taken += least
    else:
        return False
    cost = cost_of_steps(program, path)

    def in_units(unit: int, units: int) -> Steps:
        price = [
            [room.price(d * unit + need) for d in range(units + 1)] for room, need in zip(rooms, asked, strict=True)
        ]
        no, any_room = np.zeros(count, np.int64), np.full(count, units, np.int64)
        return Steps(np.array(size, np.int64) // unit, cost, np.array(price, np.int64), no, no, any_room, True)

    return finest(in_units, count, most, math.gcd(*size))


def cost_of_steps(program: Program, path: Path) -> Ints:
    """Per step, the cost of one run of each of its ops, in :data:`COST_UNITS`, rounded down."""
    return np.array([sum(_cost(program, program.buffers[b].producer or 0) for b in step) for step in path.steps])


def _cost(program: Program, op: int) -> int:
    return int(program.ops[op].seconds / max(program.seconds, 1e-30) * COST_UNITS)


class _Room:
    """Room and reruns (definitions 2 and 3) at the first run of op ``t``.

    Attributes:
        left: room, bytes.
        through: per op that counts here, its cost and the bytes that a rerun of it makes room for.
    """

    def __init__(self, program: Program, budget: int, t: int) -> None:
        op, size = program.ops[t], program.buffers
        before = {b for b, buffer in enumerate(size) if buffer.producer is not None and buffer.producer < t}
        held = {b for b in program.pinned if b in before}
        self.left = budget - op.workspace_bytes - sum(size[b].bytes for b in op.outputs)
        if t >= program.boundary:
            self.left -= program.late_bytes
        else:
            held.update(b for b in program.mutations if b in before)
        self.left -= sum(size[b].bytes for b in held)
        self.held = held
        self.through: list[tuple[int, int]] = []

    def price(self, need: int) -> int:
        """The least cost at which ``need`` bytes fit, rounded down; :data:`NO_PLAN` if they do not."""
        need -= self.left - sum(size for _, size in self.through)
        cost = 0.0
        for each, size in sorted(self.through, key=lambda pair: pair[0] / pair[1]):
            if need <= 0:
                break
            cost += each * min(1.0, need / size)
            need -= size
        return NO_PLAN if need > 0 else int(cost * (1.0 - 1e-12))


def _share_out(program: Program, path: Path, rooms: list[_Room]) -> None:
    """Take from rooms what the ops that ask read besides, and give each rerun that would make room to one of them."""
    on_path = set(path.states)
    path_ops = {program.buffers[b].producer for b in on_path}
    counts_next: dict[int, int] = {}  # per op, the earliest asking op so far at which it counts
    others = [
        (b, buffer.producer)
        for b, buffer in enumerate(program.buffers)
        if b not in on_path and b not in program.pinned and buffer.producer is not None and program.readers[b]
    ]
    last_asked = -1
    for room, t in zip(rooms, path.asked_by, strict=True):  # from the last to the first in time
        size = program.buffers
        through: dict[int, tuple[int, int]] = {}  # per op: bytes, and when they are read again
        for b, o in others:
            if o >= t or program.readers[b][-1] < t:
                continue
            following = next(r for r in program.readers[b] if r >= t)
            op = program.ops[o]
            if following == t or not op.rerunnable or (op.reads_mutated and t >= program.boundary):
                room.left -= size[b].bytes
                continue
            if o not in path_ops:
                held, until = through.get(o, (0, 0))
                through[o] = (held + size[b].bytes, max(until, following))
        if t == last_asked:
            continue
        last_asked = t
        for o, (held, until) in sorted(through.items()):
            if held and until <= counts_next.get(o, len(program.ops)):
                room.through.append((_cost(program, o), held))
                counts_next[o] = t
