"""Legal schedules far from what a planner would choose: buffers are dropped at random and remade when wanted.

Before each op of the captured order every droppable buffer is dropped with a small probability; whatever the op
then misses is computed again right before it, to any depth, before and after the boundary alike.
"""

from __future__ import annotations

import random
from dataclasses import replace

from ebbflow.step.plan import Plan
from ebbflow.step.program import Program
from ebbflow.step.schedule import Schedule
from ebbflow.step.simulate import simulate

__all__ = ["random_schedule", "with_schedule"]


def random_schedule(program: Program, seed: int, drop: float = 0.02) -> Schedule:
    """A legal schedule of ``program`` in which any rerunnable op may run again, early and late."""
    rng = random.Random(seed)
    order: list[int | None] = []
    resident = set(program.tangents)

    def remake(buffer: int) -> None:
        if buffer in resident:
            return
        producer = program.buffers[buffer].producer
        assert producer is not None
        for read in program.ops[producer].inputs:
            remake(read)
        order.append(producer)
        resident.update(program.ops[producer].outputs)

    for index, op in enumerate(program.ops):
        if index == program.boundary:
            order.append(None)
        for buffer in sorted(resident):
            if buffer not in op.inputs and _droppable(program, buffer) and rng.random() < drop:
                resident.discard(buffer)
        for buffer in op.inputs:
            remake(buffer)
        order.append(index)
        resident.update(op.outputs)
    if program.boundary == len(program.ops):
        order.append(None)
    return Schedule.from_computes(program, order)


def _droppable(program: Program, buffer: int) -> bool:
    producer = program.buffers[buffer].producer
    if producer is None or buffer in program.pinned:
        return False
    return program.ops[producer].rerunnable and not program.ops[producer].reads_mutated


def with_schedule(plan: Plan, schedule: Schedule) -> Plan:
    """``plan`` with another schedule and exactly the budget that it needs."""
    above = simulate(plan.program, schedule).above_bytes
    return replace(plan, schedule=schedule, budget_bytes=plan.resident_bytes + plan.reserve_bytes + above)
