"""The optimal dynamic program for chains of unequal steps (Beaumont et al., 2019: rotor, arXiv 1911.13214).

Definitions (forward, backward and residents as in ``published.segments`` and ``search.reruns_from_kept``):
1. The forward is cut after an op if at most a few buffers made up to it are read by later forward ops. *Step* ``i``
   is what lies between two cuts, *state* ``i`` the buffers that are read across its end.
2. The *record* of a step is what it makes and the backward reads. Reversing it begins in the stage where the backward
   first reads something of the record or of the state before it; the last step is reversed first.
3. An *option* of a step is a part of its record to be kept; the rest is made again in its reversal, where it is
   read (Rockmate, Zhao et al., ICML 2023, has several such options per block). Options drop ops that are cheapest
   per byte first.
4. What is kept when is decided by the table of ``published.chain_table``.

Memory is counted in units of the budget, sizes rounded up. What the table does not see (what overlaps inside steps)
is left to the interval state: plans for several amounts of memory are read off one table and measured, the most
memory whose plan fits is searched, reruns that a plan can do without are cancelled, and the cheapest is the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ebbtide.planners.base import Answer, Problem, Status
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.registry import planner
from ebbtide.planners.search import local_search
from ebbtide.planners.search.greedy import Incumbent, checked
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.planners.search.jit import Ints
from ebbtide.planners.search.reruns_from_kept import Residents, reruns_for_residents
from ebbtide.step.program import Program
from ebbtide.units import format_count
from ebbtide_published.planners.chain_table import NO_PLAN, Steps, Table
from ebbtide_published.planners.segments import last_forward_reads, residents_since

__all__ = ["chain"]

COST_UNITS = 1 << 40  # of the whole step: integers, so that plans are the same everywhere
WIDTHS = (1, 2, 4)  # buffers of a state at most; each that gives other cuts is tried
MOST_STEPS = 200  # beyond, neighbours are merged: the table grows with the cube of the steps
TABLE_WORK = 3e8  # inner iterations, about a second; sets the number of units
UNITS, LEAST_UNITS = 240, 24
BEYOND = 1.5  # of the budget: amounts of memory in the table, whose sizes are upper values
SHARES = (1.0, 0.66, 0.33, 0.0)  # of the record's bytes: the options
NEARBY = 4  # amounts of memory measured on each side of the one that bisection finds


@dataclass(frozen=True)
class _Chain:
    """The chain of a program.

    Attributes:
        steps: in bytes and :data:`COST_UNITS`.
        states: per step, the buffers of its state.
        kept: per step and option, the buffers kept.
        since: per buffer, the stage from which a dropped one is held once more; 0 if it is never dropped.
        reversed_at: per step, the stage in which its reversal begins.
    """

    steps: Steps
    states: list[list[int]]
    kept: list[list[list[int]]]
    since: list[int]
    reversed_at: list[int]


def _cuts(program: Program, width: int) -> list[int]:
    """Last ops of all steps (definition 1), the forward's last op included."""
    last = last_forward_reads(program)
    found: list[int] = []
    crossing: set[int] = set()
    for index, op in enumerate(program.ops[: program.boundary]):
        crossing = {b for b in crossing if last[b] > index}
        crossing.update(b for b in op.outputs if last[b] > index)
        if len(crossing) <= width or index == program.boundary - 1:
            found.append(index)
    while len(found) > MOST_STEPS:
        found = found[1::2] if len(found) % 2 == 0 else found[::2]
    return found


def _starts(program: Program, states: Sequence[list[int]], records: Sequence[list[int]]) -> list[int]:
    """Per step, the stage in which its reversal begins (definition 2); the number of ops if it never does."""
    starts: list[int] = []
    for i, record in enumerate(records):
        watched = [*(states[i - 1] if i else ()), *(b for b in record if b not in states[i])]
        starts.append(min((_backward_read(program, b) for b in watched), default=len(program.ops)))
    for i in range(len(starts) - 2, -1, -1):
        if starts[i + 1] < len(program.ops):
            starts[i] = max(starts[i], starts[i + 1])
    return starts


def _chain_of(program: Program, cuts: Sequence[int]) -> _Chain:
    """The chain of a program that is cut after the ops ``cuts``."""
    last = last_forward_reads(program)
    count = len(cuts)
    first_of = [0, *(end + 1 for end in cuts[:-1])]
    made = [
        [b for op in program.ops[first : end + 1] for b in op.outputs]
        for first, end in zip(first_of, cuts, strict=True)
    ]
    states = [[b for step in made[: i + 1] for b in step if last[b] > end] for i, end in enumerate(cuts)]
    records = [
        [b for b in made[i] if program.readers[b] and program.readers[b][-1] >= program.boundary] for i in range(count)
    ]
    starts = _starts(program, states, records)
    since = [0] * len(program.buffers)
    for buffers in made:
        for b in buffers:
            since[b] = _backward_read(program, b) + 1
    kept = [[_option(program, record, share) for share in SHARES] for record in records]
    sizes = _sizes(program, made, starts)
    costs = [_costs(program, made[i], states[i], kept[i], records[i]) for i in range(count)]
    steps = Steps(
        state=np.array([_bytes(program, state) for state in states], np.int64),
        forward=sizes[0],
        backward=sizes[1],
        before=sizes[2],
        through=np.array([each[0] for each in costs], np.int64),
        keep=np.array(
            [[_bytes(program, set(option) - set(states[i])) for option in kept[i]] for i in range(count)], np.int64
        ),
        again=np.array([each[1] for each in costs], np.int64),
        alone=np.array([each[2] for each in costs], np.int64),
        later=np.array([each[3] for each in costs], np.int64),
    )
    return _Chain(steps, states, kept, since, starts)


def _bytes(program: Program, buffers: Sequence[int] | set[int]) -> int:
    """Bytes of what is not pinned: that is there anyway."""
    return sum(program.buffers[b].bytes for b in buffers if b not in program.pinned)


def _backward_read(program: Program, b: int) -> int:
    """The first op of the backward that reads ``b``; the number of ops if there is none."""
    return next((r for r in program.readers[b] if r >= program.boundary), len(program.ops))


def _option(program: Program, record: Sequence[int], share: float) -> list[int]:
    """A part of a record: ops that are dear per byte first, up to a share of its bytes; what may not rerun, always."""
    ops = program.ops

    def worth(b: int) -> float:
        op = ops[program.buffers[b].producer or 0]
        if not op.rerunnable or op.reads_mutated or b in program.pinned:
            return float("inf")
        return op.seconds / max(sum(program.buffers[each].bytes for each in op.outputs), 1)

    total = sum(program.buffers[b].bytes for b in record)
    kept: list[int] = []
    taken = 0
    for b in sorted(record, key=lambda each: (-worth(each), each)):
        taken += program.buffers[b].bytes
        if taken <= share * total or worth(b) == float("inf"):
            kept.append(b)
    return kept


def _costs(
    program: Program, made: Sequence[int], state: Sequence[int], kept: Sequence[Sequence[int]], record: Sequence[int]
) -> tuple[int, list[int], list[int], list[int]]:
    """Costs of a step for :class:`Steps`: through, again, alone, later."""
    unit = max(program.seconds, 1e-30) / COST_UNITS
    own = set(made)

    def running(wanted: Sequence[int], there: Sequence[int] = ()) -> int:
        stack, ran = [b for b in wanted if b in own], set[int]()
        while stack:
            b = stack.pop()
            o = program.buffers[b].producer
            if b in there or o is None or o in ran or b in program.pinned:
                continue
            ran.add(o)
            stack.extend(each for each in program.ops[o].inputs if each in own)
        return sum(round(program.ops[o].seconds / unit) for o in ran)

    return (
        running(state),
        [running([*state, *option]) for option in kept],
        [running(option) for option in kept],
        [running(record, option) for option in kept],
    )


def _sizes(program: Program, made: Sequence[Sequence[int]], starts: Sequence[int]) -> tuple[Ints, Ints, Ints]:
    """Bytes of a step for :class:`Steps`: forward, backward, before; from the unplanned step without other steps."""
    n = len(program.ops)
    state = IntervalState(program)
    peak = np.array([state.stage_bytes(t) for t in range(n)], np.int64)
    of_step = np.zeros((len(made), n + 1), np.int64)
    for i, buffers in enumerate(made):
        for b in buffers:
            producer, last = program.buffers[b].producer, max(program.readers[b], default=-1)
            if producer is not None and b not in program.pinned and last > producer:
                of_step[i, producer] += program.buffers[b].bytes
                of_step[i, last + 1] -= program.buffers[b].bytes
    of_step = of_step.cumsum(axis=1)[:, :n]
    others = of_step.sum(axis=0)
    forward, backward, before = (np.zeros(len(made), np.int64) for _ in range(3))
    reached = _reversal_of(starts, n)
    for t in range(program.boundary, n):
        i = reached[t]
        backward[i] = max(backward[i], peak[t] - others[t] + of_step[i, t])
    first = 0
    for i, buffers in enumerate(made):
        end = max((program.buffers[b].producer or 0 for b in buffers), default=first)
        for t in range(first, end + 1):
            forward[i] = max(forward[i], peak[t] - of_step[:, t].sum() + of_step[i, t])
        first = end + 1
        if starts[i] < n:
            before[i] = peak[starts[i]] - others[starts[i]]
    return forward, backward, before


def _reversal_of(starts: Sequence[int], stages: int) -> list[int]:
    """Per stage, the step under reversal: the earliest one whose reversal has begun, the last one until then."""
    begins: dict[int, int] = {}
    for step, stage in enumerate(starts):
        begins.setdefault(stage, step)
    reached: list[int] = []
    step = len(starts) - 1
    for t in range(stages):
        step = min(step, begins.get(t, step))
        reached.append(step)
    return reached


def _residents(program: Program, chain: _Chain, held: Sequence[tuple[int, int, int, int]]) -> Residents:
    """What a plan of the table holds, per stage."""
    records = residents_since(program, chain.since)
    # What is to be there when a reversal begins is resident one stage later: the reversal's first stage makes it.
    reached = [len(chain.states) - 1, *_reversal_of(chain.reversed_at, len(program.ops))]
    while_reversing: list[set[int]] = [set() for _ in chain.states]
    for step, option, first, last in held:
        kept = chain.states[step] if option < 0 else chain.kept[step][option] + chain.states[step]
        for each in while_reversing[first : last + 1]:
            each.update(kept)

    def residents(t: int) -> list[int]:
        return sorted({*records(t), *while_reversing[reached[t]]})

    return residents


@planner("chain")
def chain(problem: Problem) -> Answer:
    """The dynamic program on the forward's cuts, measured for the memory that uses the budget."""
    if (unplanned := keep_all(problem)).status is Status.OPTIMAL:
        return unplanned
    found = Incumbent(problem)
    tried: list[list[int]] = []
    for width in WIDTHS:
        cuts = _cuts(problem.program, width)
        if cuts and cuts not in tried and not problem.interrupt:
            tried.append(cuts)
            found.tell(f"chain of {format_count(len(cuts), 'step')}")
            _search(found, cuts)
    return checked(problem, found, {"steps": ", ".join(str(len(cuts)) for cuts in tried)})


def _search(found: Incumbent, cuts: Sequence[int]) -> None:
    """Fill the table of one way to cut; bisect for the most memory whose plan fits, and look around it."""
    problem = found.problem
    laid = _chain_of(problem.program, cuts)
    units = _units(*laid.steps.keep.shape)
    table = Table(laid.steps.in_units(max(problem.above_budget_bytes * BEYOND / units, 1.0)), units)
    low = next((u for u in range(units + 1) if table.least(u) < NO_PLAN), units + 1)
    smallest, high = low, units

    def fits(memory: int) -> bool:
        return _measure(
            found, reruns_for_residents(problem.program, _residents(problem.program, laid, table.held(memory)))
        )

    while low < high and not problem.interrupt:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    for memory in range(max(smallest, low - NEARBY), min(units, low + NEARBY) + 1):
        if not problem.interrupt:
            fits(memory)


def _units(steps: int, options: int) -> int:
    """How many units of memory the table can have."""
    work = steps * steps * (steps + 3 * options) / 6
    return max(LEAST_UNITS, min(UNITS, int(TABLE_WORK / work)))


def _measure(found: Incumbent, reruns: list[tuple[int, int]]) -> bool:
    """Offer a plan; if it fits, also without the reruns that it can do without. Whether it fits."""
    found.state.load(reruns)
    if not found.offer():
        return False
    local_search.clean_up(found.state, found.problem.above_budget_bytes)
    return found.offer()
