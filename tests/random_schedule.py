"""Legal schedules far from what a planner would choose: buffers are dropped at random and brought back when wanted.

Before each op of the captured order every droppable buffer is dropped with a small probability; whatever the op
then misses is computed again right before it, to any depth, before and after the boundary alike. Where buffers may
move, some of those that are dropped leave for a tier first, and what has a copy there comes back from it, now and then
long before it is read; what may not run again comes back in no other way.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from ebbtide.report.plan import Plan
from ebbtide.step.machine import Link, Machine, machine_named
from ebbtide.step.program import Program
from ebbtide.step.schedule import Boundary, Compute, Hold, Offload, Reload, Schedule
from ebbtide.step.simulate import simulate

__all__ = ["DISK_MACHINE", "random_schedule", "with_schedule"]

DISK_MACHINE: Machine = replace(
    machine_named("cpu"),
    links={"disk": Link("disk", 2**33, 1e9, 1e9, 1e-4, duplex=False, alignment_bytes=4096)},
)
"""The machine at hand with a disk."""


def random_schedule(program: Program, seed: int, drop: float = 0.02, *, tiers: Sequence[str] = ()) -> Schedule:
    """A legal schedule of ``program`` in which any rerunnable op may run again, early and late.

    Args:
        program: any.
        seed: of the choices.
        drop: how likely a buffer is to be dropped before each op.
        tiers: that buffers may move to.
    """
    rng = random.Random(seed)
    steps: list[Compute | Boundary | Offload | Reload | Hold] = []
    resident = set(program.tangents)
    copied: set[int] = set()
    coming: set[int] = set()  # reloaded, and not read yet

    def run(op: int) -> None:
        steps.append(Compute(op))
        resident.update(program.ops[op].outputs)
        coming.difference_update(program.ops[op].inputs)

    def load(buffer: int) -> None:
        steps.append(Reload(buffer))
        resident.add(buffer)
        coming.add(buffer)

    def bring(buffer: int) -> None:
        if buffer in resident:
            return
        if buffer in copied and (rng.random() < 0.7 or not _may_rerun(program, buffer)):
            load(buffer)
            return
        producer = program.buffers[buffer].producer
        assert producer is not None
        # What is on its way back stays: a run of its op is no reason to have it twice.
        for read in program.ops[producer].inputs:
            bring(read)
        run(producer)

    for index, op in enumerate(program.ops):
        if index == program.boundary:
            steps.append(Boundary())
        for buffer in sorted(resident):
            may_move = bool(tiers) and buffer in program.movable
            if buffer in op.inputs or buffer in coming or not (may_move or _may_rerun(program, buffer)):
                continue
            if rng.random() >= drop:
                continue
            moves = may_move and rng.random() < 0.6
            if moves and buffer not in copied:
                steps.append(Offload(buffer, rng.choice(tiers)))
                copied.add(buffer)
                if rng.random() < 0.3:
                    continue  # a copy is made, and nothing dropped yet
            if _may_rerun(program, buffer) or buffer in copied:
                resident.discard(buffer)
        for buffer in sorted(copied.difference(resident)):
            if index < program.readers[buffer][-1] and rng.random() < drop:
                load(buffer)
        for buffer in op.inputs:
            bring(buffer)
        run(index)
    if program.boundary == len(program.ops):
        steps.append(Boundary())
    return Schedule.from_steps(program, _read(program, steps))


def _read(
    program: Program, steps: list[Compute | Boundary | Offload | Reload | Hold]
) -> list[Compute | Boundary | Offload | Reload | Hold]:
    """``steps`` without ways back that nobody reads before the buffer is made again."""
    wanted: set[int] = set()
    kept: list[Compute | Boundary | Offload | Reload | Hold] = []
    for step in reversed(steps):
        if isinstance(step, Reload) and step.buffer not in wanted:
            continue
        kept.append(step)
        if isinstance(step, Reload):
            wanted.discard(step.buffer)
        elif isinstance(step, Compute):
            wanted.difference_update(program.ops[step.op].outputs)
            wanted.update(program.ops[step.op].inputs)
    return kept[::-1]


def _may_rerun(program: Program, buffer: int) -> bool:
    producer = program.buffers[buffer].producer
    if producer is None or buffer in program.pinned:
        return False
    return program.ops[producer].rerunnable and not program.ops[producer].reads_mutated


def with_schedule(plan: Plan, schedule: Schedule) -> Plan:
    """``plan`` with another schedule and exactly the budget that it needs."""
    if schedule.moves:
        plan = replace(plan, machine=DISK_MACHINE, tiers=("disk",))
    above = simulate(plan.program, schedule, plan.machine).above_bytes
    return replace(plan, schedule=schedule, budget_bytes=plan.resident_bytes + plan.reserve_bytes + above)
