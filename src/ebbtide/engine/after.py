"""What is taken after a step's backward graph has returned, before ``.backward()`` does.

1. Hooks on parameters run there: what they make of a gradient, an optimizer that steps in them. So do the sums of
   gradients that parameters get from the step and from elsewhere. No schedule changes what is alive then: outputs,
   gradients, what user code holds.
2. It is measured in the first step of a slot and, where it is more than a few scalars, in the second: a first one may
   make what stays, as an optimizer does, and what stays is not taken again. Other hooks are measured anew.
3. From there on a budget has to hold it too, or is refused (``planning.step_end``).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from ebbtide.engine.key import CallSlot
from ebbtide.faults import users_level
from ebbtide.planning.step_end import SCALARS_BYTES, StepEnd, end_bytes
from ebbtide.report.plan import Plan
from ebbtide.units import format_allowed, format_bytes

__all__ = ["AfterBackward", "hooks_end"]

_MOST_MEASURED = 2
_WHAT = "hooks on parameters, or sums with gradients from outside the step"


@dataclass
class AfterBackward:
    """What was learned of one model (definition 2), by call slot and hooks."""

    _learned: dict[tuple[CallSlot, object], list[int]] = field(
        default_factory=dict[tuple[CallSlot, object], "list[int]"]
    )

    def is_known(self, call_slot: CallSlot, hooks: object) -> bool:
        """Whether nothing is left to measure."""
        measured = self._learned.get((call_slot, hooks), [])
        return len(measured) >= _MOST_MEASURED or measured == [0]

    def bytes(self, call_slot: CallSlot, hooks: object) -> int:
        """At the most, as far as it is known."""
        return max(self._learned.get((call_slot, hooks), [0]))

    def learn(self, call_slot: CallSlot, hooks: object, plan: Plan, peak_bytes: int, left_bytes: int) -> None:
        """A step took and left so many bytes above the level at which its backward graph returned."""
        taken = max(peak_bytes - max(left_bytes, 0), 0)
        self._learned.setdefault((call_slot, hooks), []).append(taken if peak_bytes > SCALARS_BYTES else 0)
        total = plan.resident_bytes + end_bytes(plan.program) + peak_bytes
        if total > plan.budget_bytes and peak_bytes > SCALARS_BYTES:
            warnings.warn(
                f"{_WHAT}, took {format_bytes(peak_bytes)} after the planned backward, so this step took "
                f"{format_bytes(total)}, over its budget of {format_allowed(plan.budget_bytes)}; from the next step on "
                "there is room for it, or the budget is refused",
                stacklevel=users_level(),
            )


def hooks_end(taken_bytes: int, held_bytes: int) -> StepEnd:
    """What is known to be taken so, for planning (definition 3), where the unplanned step holds ``held_bytes``."""
    remedy = "let the hooks change gradients in place (grad.mul_(mask))"
    return StepEnd(taken_bytes, held_bytes, what=_WHAT, remedy=remedy)
