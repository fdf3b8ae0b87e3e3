"""The unplanned step: captured order, every buffer freed at its last use. The baseline of all overheads."""

from __future__ import annotations

from ebbtide.step.program import Program, analysis
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate

__all__ = ["unplanned_bytes", "unplanned_schedule"]


@analysis
def unplanned_schedule(program: Program) -> Schedule:
    """The captured step in captured order with every buffer freed at its last use."""
    order: list[int | None] = list(range(len(program.ops)))
    order.insert(program.boundary, None)
    return Schedule.from_computes(program, order)


@analysis
def unplanned_bytes(program: Program) -> int:
    """The peak of the unplanned step, bytes above its start."""
    return simulate(program, unplanned_schedule(program)).above_bytes
