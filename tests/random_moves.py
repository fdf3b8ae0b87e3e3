"""Legal schedules with moves, far from what a planner would choose.

Before each op of the captured order droppable buffers are dropped at random, some of them after an offload; whatever
the op then misses is loaded where there is a copy, or computed again, to any depth, before and after the boundary
alike. Some loads are issued long before their read, some buffers are held until then, and some are moved for nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ebbtide.planners.hybrid.floor import tiers_of
from ebbtide.step.machine import Link
from ebbtide.step.program import Program
from ebbtide.step.schedule import Boundary, Compute, Hold, Offload, Reload, Schedule

__all__ = ["random_links", "random_moves"]

Step = Compute | Boundary | Offload | Reload | Hold


def random_links(rng: random.Random, *, seconds: float = 2e-3, size: int = 4, tiers: int = 2) -> dict[str, Link]:
    """Links to one or two tiers, duplex or not, on which ``size`` bytes take about ``seconds``."""

    def link(tier: str) -> Link:
        out, back = (size / (seconds * 4.0 ** rng.uniform(-1.0, 1.0)) for _ in range(2))
        return Link(
            tier,
            rng.choice([10**6, 10**6, 12, 30]),
            out,
            back,
            latency_seconds=rng.choice([0.0, 0.0, 0.1 * seconds]),
            duplex=rng.random() < 0.6,
            compute_share=rng.choice([0.0, 0.0, 0.2]),
            alignment_bytes=rng.choice([1, 1, 2]),
            least_bytes=rng.choice([0, 0, 3]),
        )

    return {tier: link(tier) for tier in ("host", "disk")[: rng.randint(1, tiers)]}


def random_moves(program: Program, links: Mapping[str, Link], seed: int) -> Schedule:
    """A legal schedule of ``program`` with reruns, offloads and loads."""
    return _Walk(program, links, random.Random(seed)).schedule()


class _Walk:
    def __init__(self, program: Program, links: Mapping[str, Link], rng: random.Random) -> None:
        self.program, self.links, self.rng = program, links, rng
        self.drop = rng.choice([0.02, 0.1, 0.3, 0.7])
        self.move = rng.choice([0.2, 0.6, 1.0])
        self.early = rng.choice([0.0, 0.1, 0.4])
        self.resident = set(program.tangents)
        self.copied: set[int] = set()
        self.unread: set[int] = set()
        self.room = {tier: link.capacity_bytes for tier, link in links.items()}
        self.steps: list[Step] = []
        self.last = [max(readers, default=-1) for readers in program.readers]

    def schedule(self) -> Schedule:
        program, rng = self.program, self.rng
        for index, op in enumerate(program.ops):
            if index == program.boundary:
                self.steps.append(Boundary())
            for b in sorted(self.resident):
                if b not in op.inputs and rng.random() < self.drop and self._may_leave(b, index):
                    self.resident.discard(b)
            for b in sorted(self.copied - self.resident):
                if rng.random() < self.early and self.last[b] >= index:
                    self._load(b)
            self._run(index)
            for b in sorted(self.resident.intersection(program.movable) - self.copied):
                if rng.random() < 0.3 * self.move and self.last[b] > index:
                    self._offload(b)
            if rng.random() < 0.2 and (held := sorted(self.resident.intersection(self.copied))):
                self.steps.append(Hold(rng.choice(held)))
        if program.boundary == len(program.ops):
            self.steps.append(Boundary())
        return Schedule.from_steps(program, self.steps)

    def _may_leave(self, b: int, index: int) -> bool:
        """Whether ``b`` may go now; it is offloaded first where that is to be."""
        producer = self.program.buffers[b].producer
        if producer is None or b in self.program.pinned or b in self.program.mutations or b in self.unread:
            return False
        if b not in self.copied and self.last[b] >= index and self.rng.random() < self.move:
            self._offload(b)
        op = self.program.ops[producer]
        return b in self.copied or (op.rerunnable and not op.reads_mutated and self._remakeable(op.inputs))

    def _remakeable(self, buffers: Sequence[int]) -> bool:
        """Whether reads can always be served: every producer up the chain may run again, or there is a copy."""
        for b in buffers:
            producer = self.program.buffers[b].producer
            if b in self.resident or b in self.copied or producer is None:
                continue
            op = self.program.ops[producer]
            if not op.rerunnable or op.reads_mutated or not self._remakeable(op.inputs):
                return False
        return True

    def _offload(self, b: int) -> None:
        size = self.program.buffers[b].bytes
        tiers = [t for t in tiers_of(self.program, b, self.links) if self.links[t].round_up(size) <= self.room[t]]
        if tiers:
            tier = self.rng.choice(tiers)
            self.room[tier] -= self.links[tier].round_up(size)
            self.steps.append(Offload(b, tier))
            self.copied.add(b)

    def _load(self, b: int) -> None:
        self.steps.append(Reload(b))
        self.resident.add(b)
        self.unread.add(b)

    def _run(self, index: int) -> None:
        for b in self.program.ops[index].inputs:
            if b not in self.resident:
                producer = self.program.buffers[b].producer
                assert producer is not None
                op = self.program.ops[producer]
                again = op.rerunnable and not op.reads_mutated and self._remakeable(op.inputs)
                if b in self.copied and (not again or self.rng.random() < 0.8):
                    self._load(b)
                else:
                    self._run(producer)
        self.steps.append(Compute(index))
        self.unread.difference_update(self.program.ops[index].inputs)
        self.resident.update(self.program.ops[index].outputs)
