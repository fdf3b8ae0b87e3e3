"""The interval state of choices: reruns, loads and holds, with exact bytes of every stage and the exact makespan.

A buffer goes to the first of the given tiers that takes it and has room for all that may be moved; what is in a tier is
counted against its capacity, so that no state has more there. A load that nobody reads is not in any state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import numpy as np

from ebbtide.planners.hybrid.choice import Choice, schedule_of
from ebbtide.planners.search import clock as _clock
from ebbtide.planners.search import interval_kernels as _runs
from ebbtide.planners.search import layout as L
from ebbtide.planners.search.interval_state import COST_RESOLUTION, IntervalState
from ebbtide.step.arrays import Ints
from ebbtide.step.machine import Link
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule

__all__ = ["HybridState"]


class HybridState(IntervalState):
    """Reruns, loads and holds over a program in captured order.

    Args:
        program: with costs.
        links: to the tiers that buffers may be moved to, by tier, the preferred one first; beyond the third they are
            left alone.
    """

    def __init__(self, program: Program, links: Mapping[str, Link]) -> None:
        super().__init__(program)
        self.tiers = tuple(links)[: L.MOST_TIERS]
        self._links = [links[tier] for tier in self.tiers]
        self._array[L.H_BASE] = self.base_cost
        self._array[L.H_TIERS] = len(self.tiers)
        first = int(self._array[L.H_BUFFERS])
        self._buffers = self._array[first : int(self._array[L.H_BUFFERS_END])].reshape(-1, L.B_COLUMNS)
        self._first = first
        for tier, link in enumerate(self._links):
            self._array[L.H_LEFT + tier] = link.capacity_bytes
        for b in sorted(program.movable):
            for tier, link in enumerate(self._links):
                if program.buffers[b].bytes >= max(link.least_bytes, 1):
                    self._assign(b, tier)
                    break

    @property
    def cost(self) -> int:
        """The objective of searches: the makespan beyond every op once."""
        return _clock.makespan(self.memory) - self.base_cost

    @property
    def seconds(self) -> float:
        """The makespan."""
        return _clock.makespan(self.memory) * self.program.seconds * COST_RESOLUTION

    @property
    def choice(self) -> Choice:
        """The reruns, loads and holds of the state."""
        reruns, loads = self._pairs(self._nodes())
        held = np.flatnonzero(self._buffers[:, L.B_HOLD] >= 0).tolist()
        return self._choice(reruns, loads, [(b, int(self._buffers[b, L.B_HOLD])) for b in held])

    def load_best(self) -> None:
        """Replace all by what the compiled search last saved as its best."""
        reruns, loads = self._pairs(self._best_rows())
        first = int(self.memory[L.H_BEST_HOLDS])
        stages = self._array[first : first + len(self._buffers)]
        moved = sorted({b for b, _ in loads})
        self.load_choice(self._choice(reruns, loads, [(b, int(stages[b])) for b in moved if stages[b] >= 0]))

    def load_choice(self, choice: Choice) -> None:
        """Take over a choice: what may not be, loads that nobody reads and holds that save no wait are left out."""
        self.load(choice.reruns)
        size = self.program.buffers
        for b in {b for b, _ in choice.loads}:
            tier = choice.tiers.get(b, "")
            if tier in self.tiers and self._buffers[b, L.B_TIER] >= 0:
                link = self._links[index := self.tiers.index(tier)]
                if size[b].bytes >= max(link.least_bytes, 1):
                    self._assign(b, index)
        for b, t in sorted(choice.loads):
            self.add_load(b, t)
        self._drop_unread()
        for b, t in sorted(choice.holds):
            if self._buffers[b, L.B_LOADS] >= 0 and self._buffers[b, L.B_HOLD] < 0 and self.may_hold(b, t):
                self.hold(b, t)
        self.commit()

    def add_load(self, buffer: int, stage: int) -> bool:
        """Load a buffer at the beginning of a stage; whether that is possible and was done."""
        return bool(_runs.add_load(self.memory, self._address(buffer), stage))

    def remove_load(self, buffer: int, stage: int) -> bool:
        """Take away a load of :attr:`choice`; whether it was done."""
        return bool(_runs.remove_load(self.memory, self._address(buffer), stage))

    def hold(self, buffer: int, stage: int) -> bool:
        """Hold a buffer until a stage ends, or for -1 no longer than it is read; whether it was done."""
        return bool(_runs.hold(self.memory, self._address(buffer), stage))

    def may_hold(self, buffer: int, stage: int) -> bool:
        """Whether a hold until ``stage`` delays the first free."""
        producer = self.program.buffers[buffer].producer
        assert producer is not None
        loads = [t for b, t in self._pairs(self._nodes())[1] if b == buffer]
        reruns = [t for o, t in self.reruns if o == producer]
        return producer < stage < min([*loads, *reruns], default=self.stages)

    def to_schedule(self) -> Schedule:
        """The schedule of :attr:`choice`."""
        return schedule_of(self.program, self.choice)

    def _drop_unread(self) -> None:
        while True:
            reads = self.program.readers
            reruns, loads = self._pairs(self._nodes())
            by_op: dict[int, list[int]] = {}
            for o, t in reruns:
                by_op.setdefault(o, []).append(t)
            dropped = False
            for b, t in loads:
                producer = self.program.buffers[b].producer
                assert producer is not None
                made = [*by_op.get(producer, []), *(s for c, s in loads if c == b)]
                following = min((s for s in made if s > t), default=self.stages)
                uses = [s for o in reads[b] for s in (o, *by_op.get(o, []))]
                if not any(t <= s < following for s in uses):
                    self.remove_load(b, t)
                    dropped = True
                    break
            if not dropped:
                return

    def _address(self, b: int) -> int:
        return self._first + b * L.B_COLUMNS

    def _assign(self, b: int, tier: int) -> None:
        """Let ``b`` go to a tier; it is in none now."""
        link, size = self._links[tier], self.program.buffers[b].bytes
        unit = max(self.program.seconds, 1e-30) * COST_RESOLUTION
        out, back = link.seconds(size, "out") / unit, link.seconds(size, "in") / unit
        row = self._buffers[b]
        row[L.B_TIER], row[L.B_STORED] = tier, link.round_up(size)
        row[L.B_OUT], row[L.B_IN] = round(out), round(back)
        row[L.B_OUT_SHARE], row[L.B_IN_SHARE] = round(out * link.compute_share), round(back * link.compute_share)
        row[L.B_OUT_LANE] = L.C_LANES + 2 * tier
        row[L.B_IN_LANE] = L.C_LANES + 2 * tier + link.duplex
        row[L.B_ESTIMATE] = 0

    def _nodes(self) -> Ints:
        node = self._array[self._array[L.H_NODES] : self._array[L.H_HIGH]].reshape(-1, L.N_COLUMNS)
        return node[node[:, L.N_OP] != -1][:, :2]

    def _pairs(self, rows: Ints) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Rows of ``(op, stage)`` or ``(-address, stage)`` as reruns and as loads."""
        reruns: list[tuple[int, int]] = []
        loads: list[tuple[int, int]] = []
        for what, stage in cast("list[tuple[int, int]]", rows.tolist()):
            if what >= 0:
                reruns.append((what, stage))
            else:
                loads.append(((-what - self._first) // L.B_COLUMNS, stage))
        return reruns, loads

    def _choice(
        self, reruns: Iterable[tuple[int, int]], loads: list[tuple[int, int]], holds: Iterable[tuple[int, int]]
    ) -> Choice:
        tiers = {b: self.tiers[int(self._buffers[b, L.B_TIER])] for b, _ in loads}
        return Choice(frozenset(reruns), frozenset(loads), frozenset(holds), tiers)
