"""What a budget must have room for at the ends of a step, before its forward or after its backward, whatever the plan.

1. When the backward graph has returned, the same is alive under every schedule: outputs, gradients, what is resident.
   What is taken on top of that (by hooks on parameters, by an optimizer whose state comes back) no plan can lower.
2. Gradients that are summed into those that there are do not outlive that: at ``optimizer.step()`` only the sums are
   left, which were resident before. A hook on a parameter meets all of them.
3. A budget has to hold the step's end too. A share is of the peak of the unplanned step with what it holds of that from
   its start on, or of the end, where that is more.
4. Before the forward nothing of the step is alive, and what is taken there is on top of what is resident alone.
5. What is kept in reserve is in no peak, so a small step may need more than its whole unplanned peak. A share of 100 %
   or more has the reserve on top wherever the unplanned step needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ebbtide.errors import BudgetError
from ebbtide.step.program import Program, analysis
from ebbtide.step.refused_budget import refused_budget
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_bytes, unplanned_schedule
from ebbtide.units import Budget, format_bytes, format_share

__all__ = [
    "INSIDE",
    "LOSS_TO_COME",
    "NOTHING_AFTER",
    "SCALARS_BYTES",
    "StepEnd",
    "budget_to_ask_for",
    "end_bytes",
    "most_of",
    "share_of_unplanned",
]


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What is taken at an end of a step (definitions 1 and 4).

    Attributes:
        bytes: above what is alive there; 0 if nothing is taken.
        held_bytes: of them, what the unplanned step holds from its start on, as this one does not.
        what: takes them, a plural.
        remedies: besides a larger budget.
        summed: whether the step's gradients are gone by then (definition 2).
        before: whether it is the end before the forward.
        gone_bytes: of what is resident when the step begins, what is gone by then: what other forwards keep.
        slack_bytes: of ``bytes``, room for scalars that later steps leave behind; a plan that holds may use it up.
    """

    bytes: int
    held_bytes: int = 0
    what: str = ""
    remedies: tuple[str, ...] = ()
    summed: bool = False
    before: bool = False
    gone_bytes: int = 0
    slack_bytes: int = 0

    def held_by(self, budget_bytes: int, program: Program, resident_bytes: int) -> bool:
        """Whether a plan that was made for ``budget_bytes`` holds where so much is resident."""
        return self.needed_bytes(program, resident_bytes) - self.slack_bytes <= budget_bytes

    def needed_bytes(self, program: Program, resident_bytes: int) -> int:
        """The least budget that holds this end, whatever the plan; 0 if nothing is taken."""
        if not self.bytes:
            return 0
        if self.before:
            return resident_bytes + self.bytes
        gone = sum(program.buffers[each].bytes for each in set(program.gradients)) if self.summed else 0
        return resident_bytes - self.gone_bytes + max(end_bytes(program) - gone, 0) + self.bytes

    def unplanned_bytes(self, program: Program, resident_bytes: int) -> int:
        """The peak that shares are of (definition 3)."""
        held = resident_bytes + unplanned_bytes(program) + self.held_bytes
        return max(held, self.needed_bytes(program, resident_bytes))

    def budget_bytes(self, budget: Budget, program: Program, resident_bytes: int, reserve_bytes: int) -> int:
        """What ``budget`` allows, a share with the reserve where it has to be in it (definition 5)."""
        allowed = budget.resolve(self.unplanned_bytes(program, resident_bytes))
        if budget.share is not None and budget.share >= 1.0:
            allowed = max(allowed, resident_bytes + reserve_bytes + unplanned_bytes(program))
        return allowed

    def error(
        self,
        program: Program,
        resident_bytes: int,
        budget_bytes: int,
        *,
        resident_parts: Mapping[str, int],
        takes_shares: bool = True,
        takes_inside: Callable[[], bool] = lambda: True,
        loss_unmeasured: bool = False,
    ) -> BudgetError:
        """Why ``budget_bytes`` are too few for a step's end, which needs more than its plan.

        Remedies that take less there are advised where the budget holds what is alive besides. An optimizer that steps
        in the backward also leaves fewer gradients.
        """
        needed = self.needed_bytes(program, resident_bytes)
        unplanned = self.unplanned_bytes(program, resident_bytes)
        when = "before the planned forward" if self.before else "after the planned backward"
        others_help = budget_bytes >= needed - self.bytes
        instead = [each for each in self.remedies if (takes_inside() if INSIDE in each else others_help)]
        asked = budget_to_ask_for(needed, unplanned, takes_shares=takes_shares)
        return refused_budget(
            f"{self.what} take too much {when}, whatever the plan",
            remedy=", or ".join([f"ask for {asked}{LOSS_TO_COME if loss_unmeasured else ''}", *instead]),
            budget_bytes=budget_bytes,
            floor_bytes=needed,
            smallest_bytes=needed,
            resident_bytes=resident_bytes,
            resident_parts=resident_parts,
            pinned_by=self.what,
            needs=[
                ("needed there", needed, share_of_unplanned(needed, unplanned)),
                ("  of that taken there", self.bytes, ""),
            ],
        )


NOTHING_AFTER = StepEnd(0)
LOSS_TO_COME = ", plus what the loss outside takes, which the first step measures"
"""After a budget to ask for, where the loss is computed outside of the model and no step has run."""
INSIDE = 'step="inside"'
"""In a remedy that has the optimizer step in the backward."""
SCALARS_BYTES = 64
"""Of a few scalar losses and their tangents."""


def share_of_unplanned(needed_bytes: int, unplanned_bytes: int, reserve_bytes: int = 0) -> str:
    """``"79.13 % of the unplanned peak"``; of more than 100 % also why (definition 5)."""
    share = f"{format_share(needed_bytes, unplanned_bytes)} of the unplanned peak"
    if needed_bytes <= unplanned_bytes or not reserve_bytes:
        return share
    return f"{share}: a plan keeps {format_bytes(reserve_bytes)} ({reserve_bytes} bytes) in reserve"


def budget_to_ask_for(needed_bytes: int, unplanned_bytes: int, *, takes_shares: bool) -> str:
    """Budgets that hold ``needed_bytes``, each accepted by whoever is told so.

    Args:
        needed_bytes: of the step.
        unplanned_bytes: the peak that shares are of.
        takes_shares: whether the budget of whoever is told may be a share.
    """
    asked = f"{needed_bytes} bytes" + (f" ({format_bytes(needed_bytes)})" if needed_bytes >= 2**10 else "")
    if not takes_shares:
        return f"at least {asked}"
    share = format_share(needed_bytes, unplanned_bytes).replace(" ", "")
    or_share = f" or {share}" if needed_bytes <= unplanned_bytes else ""
    return f"at least {asked}{or_share} (of a fitted model: ebbtide.set_budget)"


def most_of(ends: Iterable[StepEnd], program: Program) -> StepEnd:
    """The end that needs most, of those of one step at different moments."""
    return max(ends, key=lambda each: each.needed_bytes(program, 0))


@analysis
def end_bytes(program: Program) -> int:
    """What is alive when the backward graph returns, bytes above the step's start."""
    live = simulate(program, unplanned_schedule(program)).live_bytes
    return int(live[-1]) if len(live) else 0
