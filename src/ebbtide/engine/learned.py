"""What the steps of one model have taught of the code around them: what it takes, and when.

What a budget has to hold besides a step is learned from the first step of each kind, which is itself planned for the
least memory where it has to leave room for what nobody knows yet.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from ebbtide.engine.after import AfterBackward
from ebbtide.engine.key import CallSlot
from ebbtide.engine.known_windows import KnownWindows
from ebbtide.faults import users_level
from ebbtide.planning.step_end import SCALARS_BYTES
from ebbtide.report.plan import Plan
from ebbtide.units import format_allowed, format_bytes

__all__ = ["Learned"]


@dataclass(frozen=True)
class Learned:
    """What was learned of one model from its runs.

    Attributes:
        windows: what happens between the graphs of its steps.
        after: what is taken when their backwards have returned.
    """

    windows: KnownWindows = field(default_factory=KnownWindows)
    after: AfterBackward = field(default_factory=AfterBackward)

    def is_known(self, call_slot: CallSlot, hooks: object) -> bool:
        """Whether it is known what user code takes outside of the two graphs of such a call."""
        return self.windows.has_loss_of(call_slot) and self.after.is_known(call_slot, hooks)

    def learn(
        self,
        call_slot: CallSlot,
        hooks: object,
        plan: Plan,
        made_bytes: int,
        *,
        peak_bytes: int,
        left_bytes: int,
        after_bytes: int,
        after_left_bytes: int,
    ) -> None:
        """A step has ended under ``plan``: note what user code took between its two graphs and after them.

        Args:
            call_slot: of the call.
            hooks: on parameters, then.
            plan: that it ran under.
            made_bytes: state that optimizers have made since its forward, in hooks: it is resident from now on, also
                where as much has been freed meanwhile, such as gradients.
            peak_bytes: taken between the graphs (a loss outside, or what is added to one).
            left_bytes: of that, what stayed.
            after_bytes: taken after the backward graph.
            after_left_bytes: of that, what stayed.
        """
        self.after.learn(call_slot, hooks, plan, after_bytes, max(after_left_bytes, made_bytes))
        if self.windows.has_loss_of(call_slot):
            return
        tangents = plan.program.late_bytes - plan.program.held_bytes
        if peak_bytes - tangents <= SCALARS_BYTES:  # a loss that is divided or logged
            peak_bytes = left_bytes = 0
        self.windows.learn_loss(call_slot, peak_bytes, max(left_bytes - tangents, 0))
        total = plan.resident_bytes + plan.boundary_bytes + peak_bytes
        if total > plan.budget_bytes:
            warnings.warn(
                f"code outside the model took {format_bytes(peak_bytes)} between forward and backward, so this first "
                f"step took {format_bytes(total)}, over its budget of {format_allowed(plan.budget_bytes)}; "
                "from the next step on it is planned for",
                stacklevel=users_level(),
            )
