"""From a solution of the cut relaxation with lanes to a choice: when each load is issued, and what is held until when.

The relaxation says what is rerun and what is loaded after each cut. Here
1. a load is issued as late as its lane lets it arrive before its first read after the cut, behind the loads that are
   read earlier, and never before the cut: it takes bytes from then on;
2. a buffer is held after its last use before it leaves until its copy is written, as far as its first cut allows, so
   that nobody waits for it;
3. what no tier has room for stays;
4. what reads something that the forward changes is rerun before the boundary, wherever it is wanted first.
Seconds are those of first runs and reruns, without waits. Nothing is proven of the choice: it may be over the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ebbtide.planners.hybrid.choice import Choice, schedule_of
from ebbtide.planners.hybrid.floor import tiers_of
from ebbtide.step.arrays import Ints
from ebbtide.step.machine import Link, Machine
from ebbtide.step.program import Program
from ebbtide.step.schedule import Compute
from ebbtide.step.simulate import simulate

__all__ = ["Load", "looked_at", "rounded"]


@dataclass(frozen=True, slots=True)
class Load:
    """A buffer comes back from a tier after a cut.

    Attributes:
        cut: its index among the cuts.
        buffer: which.
        tier: where its copy is.
    """

    cut: int
    buffer: int
    tier: str


def looked_at(program: Program, choice: Choice, links: Mapping[str, Link]) -> tuple[Ints, float]:
    """The most that is live in each stage of the schedule of a choice, and its overhead."""
    schedule = schedule_of(program, choice)
    machine = Machine("any", "cpu", 0, {}, 1.0, 0.0, 1, dict(links))
    timeline = simulate(program, schedule, machine)
    found = np.zeros(len(program.ops), np.int64)
    stage = 0
    for action, most in zip(schedule.actions, timeline.peak_bytes.tolist(), strict=True):
        at = min(stage, len(found) - 1)
        if len(found) and most > found[at]:
            found[at] = most
        stage += isinstance(action, Compute) and action.op == stage
    return found, timeline.seconds / program.seconds - 1.0 if program.seconds else 0.0


def rounded(
    program: Program,
    links: Mapping[str, Link],
    cuts: Sequence[int],
    reruns: Iterable[tuple[int, int]],
    loads: Sequence[Load],
) -> Choice:
    """The choice of a solution.

    Args:
        program: with costs.
        links: to the tiers.
        cuts: their stages, ascending.
        reruns: as ``(op, stage)``.
        loads: after which cut each; a buffer's tier is that of its first, if there is room.
    """
    reruns = frozenset((op, _in_time(program, op, stage)) for op, stage in reruns)
    tiers = _tiers(program, links, loads)
    loads = [load for load in loads if load.buffer in tiers]
    reads = _read_stages(program, reruns, set(tiers))
    seconds = np.array([op.seconds for op in program.ops])
    for op, stage in reruns:
        seconds[stage] += program.ops[op].seconds
    begin = np.concatenate([[0.0], np.cumsum(seconds)])
    issued = _issued(program, links, cuts, loads, tiers, reads, begin)
    leaves: dict[int, int] = {}  # the first cut at which a buffer is away
    for load in loads:
        leaves[load.buffer] = min(leaves.get(load.buffer, len(program.ops)), cuts[load.cut])
    holds = _holds(program, links, leaves, tiers, reads, begin)
    return Choice(reruns, frozenset(issued), frozenset(holds), {b: tiers[b] for b, _ in issued})


def _in_time(program: Program, op: int, stage: int) -> int:
    """The stage of a rerun by clause 4."""
    return min(stage, program.boundary - 1) if program.ops[op].reads_mutated else stage


def _tiers(program: Program, links: Mapping[str, Link], loads: Iterable[Load]) -> dict[int, str]:
    """The tier of each buffer, none where no tier that takes it has room left."""
    room = {tier: link.capacity_bytes for tier, link in links.items()}
    found: dict[int, str] = {}
    for load in loads:
        if load.buffer in found:
            continue
        size = program.buffers[load.buffer].bytes
        for tier in (load.tier, *tiers_of(program, load.buffer, links)):
            if links[tier].round_up(size) <= room[tier]:
                room[tier] -= links[tier].round_up(size)
                found[load.buffer] = tier
                break
    return found


def _read_stages(program: Program, reruns: Iterable[tuple[int, int]], buffers: set[int]) -> dict[int, list[int]]:
    """The stages in which each buffer is read, ascending."""
    found = {b: set(program.readers[b]) for b in buffers}
    for op, stage in reruns:
        for b in program.ops[op].inputs:
            if b in buffers:
                found[b].add(stage)
    return {b: sorted(stages) for b, stages in found.items()}


def _issued(
    program: Program,
    links: Mapping[str, Link],
    cuts: Sequence[int],
    loads: Iterable[Load],
    tiers: Mapping[int, str],
    reads: Mapping[int, Sequence[int]],
    begin: NDArray[np.float64],
) -> set[tuple[int, int]]:
    """Time loads backwards: the last read first, each load before those that are read later (clause 1)."""
    wanted: list[tuple[int, int, int]] = []  # the stage of the read, the stage after the cut, buffer
    for load in loads:
        read = next((t for t in reads[load.buffer] if t > cuts[load.cut]), None)
        if read is not None:
            wanted.append((read, cuts[load.cut] + 1, load.buffer))
    free: dict[str, float] = {}
    found: set[tuple[int, int]] = set()
    for read, earliest, b in sorted(wanted, reverse=True):
        link = links[tiers[b]]
        lane = link.lane("in")
        start = min(float(begin[read]), free.get(lane, float("inf")))
        start -= link.seconds(program.buffers[b].bytes, "in")
        stage = int(np.searchsorted(begin, start, side="right")) - 1
        free[lane] = start
        found.add((b, min(max(stage, earliest), read)))
    return found


def _holds(
    program: Program,
    links: Mapping[str, Link],
    leaves: Mapping[int, int],
    tiers: Mapping[int, str],
    reads: Mapping[int, Sequence[int]],
    begin: NDArray[np.float64],
) -> set[tuple[int, int]]:
    """Hold buffers until their copies, in the order in which they are made, are written (clause 2)."""
    free: dict[str, float] = {}
    found: set[tuple[int, int]] = set()
    for b in sorted(leaves, key=lambda b: (program.buffers[b].producer or 0, b)):
        link, producer = links[tiers[b]], program.buffers[b].producer
        assert producer is not None
        lane = link.lane("out")
        start = max(free.get(lane, 0.0), float(begin[producer + 1]))
        free[lane] = end = start + link.seconds(program.buffers[b].bytes, "out")
        stage = min(int(np.searchsorted(begin, end, side="left")) - 1, leaves[b] - 1)
        if stage > max((t for t in reads[b] if t < leaves[b]), default=producer):
            found.add((b, stage))
    return found
