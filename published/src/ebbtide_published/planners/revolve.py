"""Binomial checkpointing of a chain (Griewank & Walther, Algorithm 799: revolve, ACM TOMS 26(1), 2000).

Definitions:
1. *Steps* ``1..l`` are the groups of forward ops that end at a separator (``segments``, definition 1), the last one
   at the forward's end. *State* ``i`` is the one buffer that the forward reads across the end of step ``i``; state
   0 is the start, which takes no bytes here.
2. The *record* of step ``i`` is what the backward reads of it: state ``i - 1`` and all that the step makes but its
   state. Reversing step ``i`` begins in the stage where the backward first reads something of its record.
3. With ``s`` *slots*, state 0 in one of them, the least number of steps that are run again is the binomial
   ``t(l, s) = r * l - C(s + r, r - 1)``, with the least ``r`` for which ``l <= C(s + r, s)``. It obeys
   ``t(l, s) = min over m of m + t(l - m, s - 1) + t(m, s)``: state ``m`` goes into a slot, the steps behind it are
   reversed, then those before it. The first sweep is the forward itself and not counted; the repeat of a step that
   makes its record is.

The plan holds, while step ``i`` is reversed, its record and the states that are then in slots. On a chain of equal
steps it reruns ``t(l, s)`` steps. On others it is what Checkmate compares with (arXiv 1910.02653, Table 1): steps
are counted, neither timed nor weighed. The number of slots is the largest that fits; beyond a few, tried in steps
of a tenth. Forwards with few separators have few steps, hence little to choose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ebbtide.planners.base import Answer, Problem, Status
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.registry import planner
from ebbtide.planners.search.reruns_from_kept import Residents
from ebbtide.step.program import Program
from ebbtide.units import format_count
from ebbtide_published.planners.segments import Trials, last_forward_reads, residents_since, separators

__all__ = ["forward_steps_again", "residents_with_slots", "revolve", "slots_when_reversing"]

DENSE = 16  # up to this many slots every number is tried, beyond it one in ten


@planner("revolve")
def revolve(problem: Problem) -> Answer:
    """The binomial schedule with the most slots that fit."""
    if (unplanned := keep_all(problem)).status is Status.OPTIMAL:
        return unplanned
    trials = Trials(problem)
    steps = len(_chain_of(problem.program).states)
    for slots in _slot_numbers(steps):
        if problem.interrupt:
            break
        over, _ = trials.measure(
            f"{format_count(slots, 'slot')}, {format_count(steps, 'step')}",
            residents_with_slots(problem.program, slots),
        )
        if not over:
            break
    return trials.answer()


@lru_cache(maxsize=1 << 16)
def forward_steps_again(steps: int, slots: int) -> int:
    """``t(l, s)``, definition 3."""
    if steps <= 1:
        return 0
    repeats = 1
    while math.comb(slots + repeats, slots) < steps:
        repeats += 1
    return repeats * steps - math.comb(slots + repeats, repeats - 1)


def slots_when_reversing(steps: int, slots: int) -> list[tuple[int, ...]]:
    """The states in slots while each step is reversed.

    Args:
        steps: ``l``, at least 0.
        slots: ``s``, at least 1; state 0 takes one.

    Returns:
        For ``i`` from 1 to ``l``, at index ``i - 1``, the states other than 0, ascending.
    """
    found: list[tuple[int, ...]] = [()] * steps
    # Ranges of steps to be reversed, the next one last: first state, last step, slots in all, states in slots.
    ranges: list[tuple[int, int, int, tuple[int, ...]]] = [(0, steps, slots, ())]
    while ranges:
        low, high, free, held = ranges.pop()
        if high - low <= 1 or free == 1:
            found[low:high] = [held] * (high - low)
            continue
        split = low + _split(high - low, free)
        ranges.append((low, split, free, held))
        ranges.append((split, high, free - 1, (*held, split)))
    return found


def _split(steps: int, slots: int) -> int:
    """The first ``m`` that attains the minimum of definition 3."""
    again = forward_steps_again
    return min(range(1, steps), key=lambda m: m + again(steps - m, slots - 1) + again(m, slots))


def _slot_numbers(steps: int) -> Iterator[int]:
    """Numbers of slots to try, from one per step down to 1."""
    slots = steps
    while slots > 0:
        yield slots
        slots -= max(1, slots // 10 if slots > DENSE else 1)


@dataclass(frozen=True)
class _Chain:
    """The forward as a chain.

    Attributes:
        states: per step, the state at its end; empty for the last one and where nothing is read across.
        records: per step, the buffers of its record.
        reversed_at: per step, the stage at which its reversal begins; the number of ops if it never does.
    """

    states: list[tuple[int, ...]]
    records: list[list[int]]
    reversed_at: list[int]


def _chain_of(program: Program) -> _Chain:
    """Steps, states and records of a program (definitions 1 and 2)."""
    last = last_forward_reads(program)
    ends = separators(program)
    if program.boundary and (not ends or ends[-1] != program.boundary - 1):
        ends.append(program.boundary - 1)
    states: list[tuple[int, ...]] = []
    records: list[list[int]] = []
    first = 0
    before: tuple[int, ...] = ()
    for end in ends:
        made = [b for op in program.ops[first : end + 1] for b in op.outputs]
        state = tuple(b for b in made if last[b] > end)
        records.append([*before, *(b for b in made if b not in state)])
        states.append(state)
        first, before = end + 1, state
    reversed_at = [_first_backward_read(program, record) for record in records]
    return _Chain(states, records, reversed_at)


def _first_backward_read(program: Program, buffers: Sequence[int]) -> int:
    """The first op of the backward that reads one of ``buffers``; the number of ops if there is none."""
    return min((r for b in buffers for r in program.readers[b] if r >= program.boundary), default=len(program.ops))


def residents_with_slots(program: Program, slots: int) -> Residents:
    """What is held with so many slots, state 0 in one of them."""
    chain = _chain_of(program)
    steps = len(chain.states)
    since = [0] * len(program.buffers)
    for step in range(steps - 1):  # the last step's record is held from the first sweep on
        for b in chain.records[step]:
            since[b] = chain.reversed_at[step] + 1
    in_slots = slots_when_reversing(steps, slots)
    reached = _reached(chain, len(program.ops))
    records = residents_since(program, since)

    def residents(t: int) -> list[int]:
        states = (b for i in in_slots[reached[t]] for b in chain.states[i - 1]) if steps else ()
        return [*records(t), *states]

    return residents


def _reached(chain: _Chain, stages: int) -> list[int]:
    """Per stage, the index of the earliest step whose reversal began before it; the last one to begin with."""
    begins: dict[int, int] = {}
    for step, stage in enumerate(chain.reversed_at):
        begins.setdefault(stage, step)
    reached: list[int] = []
    step = len(chain.reversed_at) - 1
    for t in range(stages):
        reached.append(step)
        step = min(step, begins.get(t, step))
    return reached
