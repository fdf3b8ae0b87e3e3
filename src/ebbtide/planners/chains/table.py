"""The table of the recurrence for a path's steps (``chains.bound`` has it and its proof), compiled.

``cost(a, b, d)`` is the least cost to reverse steps ``a + 1..b`` while ``d`` units are taken by states of lower steps,
their first runs included::

    cost(a, a, d) = 0
    cost(a, b, d) = min over p in a + 1..b of
        seconds(a + 1..p) + cost(p, b, d + held(a, p)) + cost(a, p - 1, d) + price(p, d)

where ``held`` is the size of ``p``, or for a bound that of the smallest step in ``a + 1..p``. For a plan, ``p`` must
also be such that what it takes to run steps ``a + 1..p`` fits beside ``d``. Where every step can be held while those
above it are reversed, and nothing is to be paid for that, the cost is that of one run of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from ebbtide.planners.search.jit import Ints, Words, apart

__all__ = ["COST_UNITS", "NO_PLAN", "PathTable", "Steps", "finest"]

NO_PLAN = 1 << 60
COST_UNITS = 1 << 44  # of the unplanned step: small beside NO_PLAN however often steps run
MOST_UNITS = 512  # of room, where the sizes have a common divisor; elsewhere:
UNITS, LEAST_UNITS = 240, 8
TABLE_WORK = 300_000_000  # inner iterations, less than a second; equal steps take the most where a third of them fit
TABLE_CELLS = 1 << 24  # 128 MiB


@dataclass(frozen=True)
class Steps:
    """What the table asks of steps ``1..n``; row 0 of each array belongs to step 1. Sizes are in units.

    Attributes:
        size: shape ``(n,)``.
        cost: of one run, shape ``(n,)``.
        price: what asking for the step costs when ``d`` units are taken, shape ``(n, units + 1)``, never falling;
            :data:`NO_PLAN` where it cannot be had.
        first: what running it takes beside the state below it, shape ``(n,)``.
        run: what running it takes, the state below it included, shape ``(n,)``.
        room: what there is for running steps when this one is reversed, shape ``(n,)``.
        bound: whether ``held`` is the smallest step's size.
    """

    size: Ints
    cost: Ints
    price: Ints
    first: Ints
    run: Ints
    room: Ints
    bound: bool

    @property
    def units(self) -> int:
        """Units of memory that the table reaches to."""
        return self.price.shape[1] - 1

    @property
    def work(self) -> int:
        """Inner iterations that the table takes, at most."""
        count = len(self.size)
        reach = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.size)])
        free = int(min(((self.price == 0).sum(axis=1) - 1).min(), self.room.min() - self.first.max()))
        span = np.maximum(np.arange(count + 1)[None, :] - np.arange(count + 1)[:, None], 0)
        fits = np.maximum(free - reach[None, :] + reach[:, None], -1)
        return int((span * np.maximum(np.minimum(self.units, reach[:, None]) - fits, 0)).sum())


def finest(make: Callable[[int, int], Steps], steps: int, most_bytes: int, divisor: int) -> Steps | None:
    """Steps in units as small as the limits of the table allow.

    Args:
        make: from bytes per unit and a number of units.
        steps: how many.
        most_bytes: room.
        divisor: of all sizes: as a unit it rounds nothing.

    Returns:
        ``None`` if the limits leave too few units.
    """
    unit = divisor
    while True:
        units = most_bytes // unit
        if units <= MOST_UNITS and (steps + 1) * (steps + 2) // 2 * (units + 1) <= TABLE_CELLS:
            made = make(unit, units)
            if made.work <= TABLE_WORK:
                return made
        if units < LEAST_UNITS:
            return None
        unit = max(2 * unit, most_bytes // UNITS)


@apart
def fill_path_table(m: Words, cost: Words, steps: int, units: int, bound: bool) -> None:
    """Fill ``cost`` up to the units that steps ``1..a`` can take.

    ``m`` holds, for steps 0 to ``steps``: size; cost and then units of it and all below; units that are free when it is
    asked for; first, run and room as in :class:`Steps`; and a row of prices.
    """
    row = steps + 1
    size, below, reach, free, first, run, room, price = 0, row, 2 * row, 3 * row, 4 * row, 5 * row, 6 * row, 7 * row
    width = units + 1
    for span in range(steps + 1):
        for a in range(steps + 1 - span):
            b = a + span
            here = (a * (steps + 1) - a * (a - 1) // 2 + span) * width
            end = min(units, m[reach + a]) + 1
            fits = units
            for p in range(a + 1, b + 1):
                left = min(m[free + p], m[room + b] - m[first + p])
                fits = min(fits, left - m[reach + p - 1] + m[reach + a])
            for d in range(end):
                cost[here + d] = m[below + b] - m[below + a] if d <= fits else NO_PLAN
            begin = max(fits + 1, 0)
            if begin >= end:
                continue
            held, running = units + 1, m[first + a + 1]
            for p in range(a + 1, b + 1):
                held = min(held, m[size + p]) if bound else m[size + p]
                running = max(running, m[run + p]) if p > a + 1 else running
                once = m[below + p] - m[below + a]
                lower = (a * (steps + 1) - a * (a - 1) // 2 + p - 1 - a) * width
                upper = (p * (steps + 1) - p * (p - 1) // 2 + b - p) * width + (held if p < b else 0)
                paid = price + p * width
                last = min(end, width - held) if p < b else end
                for d in range(begin, min(last, m[room + b] - running + 1)):
                    cost[here + d] = min(cost[here + d], once + cost[upper + d] + cost[lower + d] + m[paid + d])


class PathTable:
    """The table of some steps, and the plan in it.

    Args:
        steps: at least one.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        count, width = len(steps.size), steps.units + 1
        nothing = np.zeros(1, np.int64)
        free = (steps.price == 0).sum(axis=1) - 1
        self._below = np.concatenate([nothing, np.cumsum(steps.cost)])
        rows = [steps.size, steps.cost.cumsum(), steps.size.cumsum(), free, steps.first, steps.run, steps.room]
        parts = [part for each in rows for part in (nothing, each)]
        packed = np.concatenate([*parts, np.zeros(width, np.int64), steps.price.ravel()]).astype(np.int64)
        self._cost = np.zeros(((count + 1) * (count + 2) // 2, width), np.int64)
        fill_path_table(cast(Words, packed), cast(Words, self._cost), count, steps.units, steps.bound)

    @property
    def least(self) -> int:
        """The least cost of all steps, first runs included; at least :data:`NO_PLAN` if there is none."""
        return self._at(0, len(self.steps.size), 0)

    def held(self) -> list[tuple[int, int]]:
        """Which steps are held while others are reversed in a plan of least cost.

        Returns:
            A step, and the highest of those above it that are reversed meanwhile; counted from 0.
        """
        found: list[tuple[int, int]] = []
        work = [(0, len(self.steps.size), 0)]
        while work:
            a, b, d = work.pop()
            if a == b:
                continue
            p = self._split(a, b, d)
            if p < b:
                found.append((p - 1, b - 1))
            work.append((p, b, d + self._held(a, p)))
            work.append((a, p - 1, d))
        return found

    def _held(self, a: int, p: int) -> int:
        return int(self.steps.size[a:p].min()) if self.steps.bound else int(self.steps.size[p - 1])

    def _at(self, a: int, b: int, d: int) -> int:
        count = len(self.steps.size)
        if a == b:
            return 0
        if d > self.steps.units:
            return NO_PLAN
        return int(self._cost[a * (count + 1) - a * (a - 1) // 2 + b - a, d])

    def _split(self, a: int, b: int, d: int) -> int:
        """The first ``p`` that attains the minimum."""
        steps, goal = self.steps, self._at(a, b, d)
        running = int(steps.first[a])
        for p in range(a + 1, b + 1):
            running = max(running, int(steps.run[p - 1])) if p > a + 1 else running
            if d + running > steps.room[b - 1]:
                break
            once = int(self._below[p] - self._below[a])
            above = self._at(p, b, d + self._held(a, p))
            if once + above + self._at(a, p - 1, d) + int(steps.price[p - 1, d]) == goal:
                return p
        raise AssertionError("the table has no such entry")
