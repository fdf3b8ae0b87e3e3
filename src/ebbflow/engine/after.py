"""What is taken after a step's backward graph has returned, before ``.backward()`` does.

1. Hooks on parameters run there: what they make of a gradient, an optimizer that steps in them. So do the sums of
   gradients that parameters get from the step and from elsewhere. No schedule changes what is alive then: outputs,
   gradients, what user code holds.
2. It is measured in the first step of a slot and, where it is more than a few scalars, in the second: a first one may
   make what stays, as an optimizer does, and what stays is not taken again. Other hooks are measured anew.
3. From there on a budget has to have room for it, or is refused. A share is of what the step takes with it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from ebbflow.engine.executable import SCALARS_BYTES
from ebbflow.engine.key import Slot
from ebbflow.errors import BudgetError
from ebbflow.faults import users_level
from ebbflow.step.plan import Plan
from ebbflow.step.program import Program, analysis
from ebbflow.step.simulate import simulate
from ebbflow.step.unplanned import unplanned_bytes, unplanned_schedule
from ebbflow.units import Budget, format_allowed, format_bytes

__all__ = ["AfterBackward", "Room", "budget_with_room", "end_bytes"]

_MOST_MEASURED = 2
_WHAT = "hooks on parameters, or sums with gradients from outside the step"


@dataclass
class AfterBackward:
    """What was learned of one model (definition 2), by slot and hooks."""

    _known: dict[tuple[Slot, object], list[int]] = field(default_factory=dict[tuple[Slot, object], "list[int]"])

    def is_known(self, slot: Slot, hooks: object) -> bool:
        """Whether nothing is left to measure."""
        measured = self._known.get((slot, hooks), [])
        return len(measured) >= _MOST_MEASURED or measured == [0]

    def bytes(self, slot: Slot, hooks: object) -> int:
        """At the most, as far as it is known."""
        return max(self._known.get((slot, hooks), [0]))

    def learn(self, slot: Slot, hooks: object, plan: Plan, peak_bytes: int, left_bytes: int) -> None:
        """A step took and left so many bytes above the level at which its backward graph returned."""
        taken = peak_bytes - max(left_bytes, 0)
        self._known.setdefault((slot, hooks), []).append(taken if peak_bytes > SCALARS_BYTES else 0)
        total = plan.resident_bytes + end_bytes(plan.program) + peak_bytes
        if total > plan.budget_bytes and peak_bytes > SCALARS_BYTES:
            warnings.warn(
                f"{_WHAT}, took {format_bytes(peak_bytes)} after the planned backward, so this step took "
                f"{format_bytes(total)}, over its budget of {format_bytes(plan.budget_bytes)}; from the next step on "
                "there is room for it, or the budget is refused",
                stacklevel=users_level(),
            )


@analysis
def end_bytes(program: Program) -> int:
    """What is alive when the backward graph returns, bytes above the step's start."""
    live = simulate(program, unplanned_schedule(program)).live_bytes
    return int(live[-1]) if len(live) else 0


@dataclass(frozen=True, slots=True)
class Room:
    """What a budget has to have room for at the end of a step, whatever the plan.

    Attributes:
        bytes: above what is alive when the backward graph returns.
        held_bytes: of them, what the unplanned step holds from its start on, as this one does not.
        what: takes them, a plural.
        remedy: besides a larger budget.
    """

    bytes: int
    held_bytes: int = 0
    what: str = _WHAT
    remedy: str = "let the hooks change gradients in place (grad.mul_(mask))"


def budget_with_room(budget: Budget, program: Program, resident_bytes: int, room: Room) -> Budget:
    """``budget``, in bytes of a step that ends with ``room`` (definition 3).

    Raises:
        BudgetError: if there is no room, whatever the plan.
    """
    if not room.bytes:
        return budget
    needed = resident_bytes + end_bytes(program) + room.bytes
    held = resident_bytes + unplanned_bytes(program) + room.held_bytes
    allowed = budget.resolve(max(held, needed))
    if needed <= allowed:
        return Budget(bytes=allowed) if room.held_bytes or held < needed else budget
    raise BudgetError(
        f"a budget of {format_allowed(allowed)} ({allowed} bytes) is too small: {room.what}, take "
        f"{format_bytes(room.bytes)} after the planned backward, so that {format_bytes(needed)} ({needed} bytes) are "
        f"taken at its end, whatever the plan. Ask for {needed} bytes or more (ebbflow.set_budget), or {room.remedy}",
        budget_bytes=allowed,
        floor_bytes=needed,
        smallest_bytes=needed,
        resident_bytes=resident_bytes,
        pinned_by=room.what,
    )
