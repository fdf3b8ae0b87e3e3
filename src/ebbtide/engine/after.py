"""What is taken after a step's backward graph has returned, before ``.backward()`` does.

1. Hooks on parameters run there: what they make of a gradient, an optimizer that steps in them. So do the sums of
   gradients that parameters get from the step and from elsewhere. No schedule changes what is alive then: outputs,
   gradients, what user code holds.
2. It is measured in the first step of a slot and, where it is more than a few scalars, in the second: a first one may
   make what stays, as an optimizer does, and what stays is not taken again. Other hooks are measured anew.
3. From there on a budget has to hold it too, or is refused (``planning.step_end``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ebbtide.engine.key import CallSlot
from ebbtide.measurement.step_record import Part, Taken
from ebbtide.planning.step_end import SCALARS_BYTES, StepEnd

__all__ = ["AfterBackward", "hooks_end"]

_MOST_MEASURED = 2


@dataclass(slots=True)
class _Known:
    """What steps took at the most, how many were measured, and whether the last of them took nothing or made state."""

    bytes: int = 0
    steps: int = 0
    nothing: bool = False
    makes_state: bool = False


@dataclass
class AfterBackward:
    """What was learned of one model (definition 2), by call slot and hooks."""

    _learned: dict[tuple[CallSlot, object], _Known] = field(default_factory=dict[tuple[CallSlot, object], "_Known"])

    def is_known(self, call_slot: CallSlot, hooks: object) -> bool:
        """Whether nothing is left to measure."""
        known = self._learned.get((call_slot, hooks))
        return known is not None and (known.steps >= _MOST_MEASURED or known.nothing)

    def bytes(self, call_slot: CallSlot, hooks: object) -> int:
        """At the most, as far as it is known."""
        known = self._learned.get((call_slot, hooks))
        return 0 if known is None else known.bytes

    def learn(self, call_slot: CallSlot, hooks: object, taken: Taken, made_bytes: int) -> None:
        """A step took so much above the level at which its backward graph returned, optimizer state among it."""
        known = self._learned.setdefault((call_slot, hooks), _Known())
        known.steps += 1
        found = taken.peak_bytes - max(taken.left_bytes, made_bytes, 0) if taken.peak_bytes > SCALARS_BYTES else 0
        known.bytes = max(0 if known.makes_state else known.bytes, found)
        known.nothing, known.makes_state = not found and not made_bytes, made_bytes > 0


def hooks_end(taken_bytes: int, held_bytes: int) -> StepEnd:
    """What is known to be taken so, for planning (definition 3), where the unplanned step holds ``held_bytes``."""
    remedies = ("let the hooks change gradients in place (grad.mul_(mask))",)
    return StepEnd(taken_bytes, held_bytes, what=Part.AFTER.value, remedies=remedies)
