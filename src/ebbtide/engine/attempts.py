"""What one training call remembers while it goes through the loop: what did not do, and why it goes round once more."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ebbtide.cost.profiling_budget import ProfilingBudget
from ebbtide.engine.call_context import CallContext
from ebbtide.engine.captured_steps import CapturedSteps
from ebbtide.engine.step import Step
from ebbtide.errors import BudgetError, CaptureError

__all__ = ["Again", "Attempts"]

_MOST = 12
"""Times that a call is tried at all. Each has a cause of its own; more of them means that something changes always."""


class Again(enum.Enum):
    """Why a call is tried once more, with how often that helps at the most."""

    STALE = "what the step was captured for has changed before it ran", 3
    """Something else changes the model meanwhile: another thread a flag, say."""
    ROOM = "a refused budget leaves room to find out more about its ops", 4
    CAPTURED_IN_ROOM = "the step was captured without memory, and the budget that its refusal names has some", 1
    ASKED = "another thread has asked for another budget or optimizer", 2

    @property
    def most(self) -> int:
        """How often it helps."""
        return self.value[1]


@dataclass(eq=False, slots=True)
class Attempts:
    """The attempts at one call.

    Attributes:
        rejected: steps that were found not to serve the call.
        refused: the refusal whose named budget leaves the room in which ops are tried out; ``None`` before the first.
        profiling: of the last attempt; ``None`` before the first.
        first: whether nothing was tried yet.
    """

    rejected: tuple[Step, ...] = ()
    refused: BudgetError | None = None
    profiling: ProfilingBudget | None = None
    first: bool = True
    _counted: tuple[Again, ...] = ()

    def may(self, why: Again) -> bool:
        """Whether the call is tried once more, for this reason; counts it."""
        if self._counted.count(why) >= why.most or len(self._counted) >= _MOST:
            return False
        self._counted += (why,)
        return True

    def reject(self, step: Step, steps: CapturedSteps, now: CallContext) -> None:
        """Note that ``step`` does not serve the call."""
        steps.reject(step, now)
        self.rejected += (step,)

    def count_stale(self, error: CaptureError, *, fresh: bool) -> None:
        """Begin again with all steps, if the one whose guards did not hold was captured for this very call (``fresh``).

        Raises:
            CaptureError: if steps are captured and something changes before they run, again and again.
        """
        if not fresh:
            return
        if not self.may(Again.STALE):
            raise CaptureError(
                f"it was captured, and when it was to run it was another step: {error}",
                remedy="let nothing change the model, or what its branches look at, while a training call runs",
            ) from error
        self.rejected = ()
