"""The table of the dynamic program for chains of unequal steps (rotor, arXiv 1911.13214), compiled.

``cost(s, t, m)`` is the least rerun cost to reverse steps ``s..t``, begun when ``t`` is to be reversed (for the last
``t``: in the first forward, which is free), state ``s - 1`` at hand, with ``m`` units of memory. The least of two:
1. Step ``s`` keeps one of its options and its state, and ``s + 1..t`` go on with what is left; then ``s`` is reversed.
2. Steps ``s..c - 1`` run without a trace, state ``c - 1`` is kept while ``c..t`` are reversed, and ``s..c - 1`` are
   reversed thereafter with all of ``m``.

On equal steps whose records cannot be kept that is Revolve's recurrence (Griewank & Walther, ACM TOMS 26(1), 2000).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from ebbtide.planners.search.jit import Ints, Words, apart

__all__ = ["NO_PLAN", "Steps", "Table"]

NO_PLAN = 1 << 60


@dataclass(frozen=True)
class Steps:
    """A chain, in any unit of bytes and cost. Arrays are per step, and per option where there are two axes.

    Attributes:
        state: bytes of the state at the end.
        forward: bytes that a run of the step takes beside the state before it.
        backward: bytes that its reversal takes, its own record included.
        before: bytes that are there when its reversal begins, beside states and records.
        through: cost of running it for its state.
        keep: bytes kept.
        again: cost of running it for its state and what is kept.
        alone: cost of running it for what is kept.
        later: cost of making the rest in its reversal.
    """

    state: Ints
    forward: Ints
    backward: Ints
    before: Ints
    through: Ints
    keep: Ints
    again: Ints
    alone: Ints
    later: Ints

    def in_units(self, unit: float) -> Steps:
        """This chain with bytes counted in units, rounded up."""

        def up(sizes: Ints) -> Ints:
            return np.ceil(sizes / unit).astype(np.int64)

        return replace(
            self,
            state=up(self.state),
            forward=up(self.forward),
            backward=up(self.backward),
            before=up(self.before),
            keep=up(self.keep),
        )


@apart
def fill_chain_table(m: Words, cost: Words, steps: int, options: int, units: int) -> None:
    """Fill ``cost[s, t, m]`` for ``m`` from 0 to ``units``; ``m`` holds the rows of :class:`Steps`."""
    state, forward, backward, before, through = 0, steps, 2 * steps, 3 * steps, 4 * steps
    keep = 5 * steps
    again, alone, later = keep + steps * options, keep + 2 * steps * options, keep + 3 * steps * options
    size = units + 1
    for span in range(steps):
        for s in range(steps - span):
            t = s + span
            rerun = 0 if t == steps - 1 else 1
            base = rerun * m[before + t]
            row = (s * steps + t) * size
            for u in range(size):
                cost[row + u] = NO_PLAN
            for k in range(options):
                j = s * options + k
                least = max(m[backward + s], m[forward + s] + base)
                if span == 0:
                    price = rerun * m[alone + j] + m[later + j]
                    for u in range(least, size):
                        cost[row + u] = min(cost[row + u], price)
                else:
                    price = rerun * m[again + j] + m[later + j]
                    taken = m[keep + j] + m[state + s]
                    behind = ((s + 1) * steps + t) * size - taken
                    for u in range(max(least, taken), size):
                        cost[row + u] = min(cost[row + u], price + cost[behind + u])
            swept, least = 0, 0
            for c in range(s + 1, t + 1):
                swept += rerun * m[through + c - 1]
                least = max(least, m[forward + c - 1] + base)
                taken = m[state + c - 1]
                behind, ahead = (c * steps + t) * size - taken, (s * steps + c - 1) * size
                for u in range(max(least, taken), size):
                    cost[row + u] = min(cost[row + u], swept + cost[behind + u] + cost[ahead + u])
            for u in range(size):  # a sum with NO_PLAN in it is none either
                cost[row + u] = min(cost[row + u], NO_PLAN)


class Table:
    """The table of a chain, and the plans in it.

    Args:
        steps: in units of memory.
        units: the most memory in the table.
    """

    def __init__(self, steps: Steps, units: int) -> None:
        self.steps, self.units = steps, units
        count, options = steps.keep.shape
        rows = (steps.state, steps.forward, steps.backward, steps.before, steps.through)
        parts = (steps.keep, steps.again, steps.alone, steps.later)
        packed = np.concatenate([each.ravel() for each in (*rows, *parts)]).astype(np.int64)
        self.cost = np.zeros((count, count, units + 1), np.int64)
        fill_chain_table(cast(Words, packed), cast(Words, self.cost), count, options, units)

    def least(self, memory: int) -> int:
        """The least cost with so much memory, :data:`NO_PLAN` if there is none."""
        return int(self.cost[0, -1, memory])

    def held(self, memory: int) -> list[tuple[int, int, int, int]]:
        """What the plan holds while steps are reversed.

        Returns:
            Step, option (-1: its state alone), and the first and the last step that is reversed meanwhile.
        """
        found: list[tuple[int, int, int, int]] = []
        work = [(0, len(self.steps.state) - 1, memory)]
        while work:
            s, t, m = work.pop()
            k, c = self._choice(s, t, m)
            if k >= 0:
                found.append((s, k, s, t))
                if s < t:
                    work.append((s + 1, t, m - int(self.steps.keep[s, k] + self.steps.state[s])))
            else:
                found.append((c - 1, -1, c, t))
                work.append((c, t, m - int(self.steps.state[c - 1])))
                work.append((s, c - 1, m))
        return found

    def _choice(self, s: int, t: int, m: int) -> tuple[int, int]:
        """The option that attains the minimum, and -1; or -1 and where to split."""
        steps, goal = self.steps, int(self.cost[s, t, m])
        rerun = 0 if t == len(steps.state) - 1 else 1
        for k in range(steps.keep.shape[1]):
            if s == t:
                price = rerun * steps.alone[s, k] + steps.later[s, k]
            else:
                rest = m - int(steps.keep[s, k] + steps.state[s])
                if rest < 0:
                    continue
                price = rerun * steps.again[s, k] + steps.later[s, k] + self.cost[s + 1, t, rest]
            if int(price) == goal:
                return k, -1
        swept = 0
        for c in range(s + 1, t + 1):
            swept += rerun * int(steps.through[c - 1])
            rest = m - int(steps.state[c - 1])
            if rest >= 0 and swept + int(self.cost[c, t, rest] + self.cost[s, c - 1, m]) == goal:
                return -1, c
        raise AssertionError("the table has no such entry")
