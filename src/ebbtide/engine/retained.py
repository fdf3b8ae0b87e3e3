"""Room for backwards that retain their graph (``retain_graph=True``).

1. Such a backward gives nothing back of what crosses the boundary: whatever the plan frees of it stays, and what an op
   would write over it copies. One that comes *again* meets the gradients of the one before as well.
2. Autograd tells only when the backward starts, so the first one of a slot runs as it was planned, without that room.
   It is learned from there, and later steps of the slot are planned with it.
3. Planners know nothing of this: a plan's *excess* over its budget is put aside and planned around, until there is
   none. What a plan leaves free of its budget is put aside besides: with less the same plan would come again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ebbtide.errors import BudgetError
from ebbtide.report.plan import Plan
from ebbtide.step.op_traits import traits_of_op
from ebbtide.step.program import Program
from ebbtide.step.schedule import Boundary, Compute, Free, Schedule
from ebbtide.step.simulate import Timeline

__all__ = ["Retained", "plan_retained", "retained_above_bytes", "retained_bytes"]

_MOST_TRIES = 6


@dataclass(frozen=True, slots=True)
class Retained:
    """What is known of the backwards of one slot.

    Attributes:
        again: whether there is more than one through the same graph.
        after_bytes: what user code takes after the first of them while the graph is there; ``None`` before that is
            measured.
    """

    again: bool = False
    after_bytes: int | None = None


def retained_above_bytes(program: Program, schedule: Schedule, timeline: Timeline, retained: Retained) -> int:
    """The peak above the step's start if the backward retains its graph (definition 1)."""
    boundary = schedule.actions.index(Boundary())
    crossing: set[int] = set()
    for action in schedule.actions[:boundary]:
        match action:
            case Compute(op):
                crossing.update(program.ops[op].outputs)
            case Free(buffer):
                crossing.discard(buffer)
            case _:
                pass
    staying = np.zeros(len(schedule.actions), dtype=np.int64)
    for index, action in enumerate(schedule.actions[boundary:], boundary):
        if isinstance(action, Free) and action.buffer in crossing:
            crossing.remove(action.buffer)
            staying[index:] += program.buffers[action.buffer].bytes
    for index, action in enumerate(schedule.actions):
        if isinstance(action, Compute) and traits_of_op(program.ops[action.op].target).writes:
            staying[index] += max(program.buffers[each].bytes for each in program.ops[action.op].inputs)
    again = sum(program.buffers[b].bytes for b in program.gradients) if retained.again else 0
    backward = (timeline.peak_bytes + staying)[boundary:].max(initial=0)
    after = int(timeline.live_bytes[-1] + staying[-1]) + (retained.after_bytes or 0) if len(staying) else 0
    return max(timeline.above_bytes, int(backward) + again, after)


def plan_retained(plan: Plan, make: Callable[[int], Plan], retained: Retained) -> Plan | None:
    """A plan that holds though the backward retains its graph (definition 3), or ``None`` if none was found.

    Args:
        plan: that holds if it does not.
        make: one within the same budget with so many bytes put aside; raises ``BudgetError`` if there is none.
        retained: what is known.
    """
    aside, reserve = 0, plan.reserve_bytes
    for _ in range(_MOST_TRIES):
        needs = retained_bytes(plan, retained) - plan.reserve_bytes + reserve
        excess = needs - plan.budget_bytes
        if excess <= 0:
            return replace(plan, reserve_bytes=needs - plan.predicted_peak_bytes)
        free = plan.budget_bytes - plan.predicted_peak_bytes - reserve
        aside = max(aside + excess, free + 1)
        try:
            plan = make(aside)
        except BudgetError:
            return None
    return None


def retained_bytes(plan: Plan, retained: Retained) -> int:
    """The budget that a step needs under ``plan`` if its backward retains its graph."""
    above = retained_above_bytes(plan.program, plan.schedule, plan.timeline, retained)
    return plan.resident_bytes + plan.reserve_bytes + above
