"""What the steps of one model have taught of the code around them: what it takes, and when.

What a budget has to hold besides a step is learned from the first step of each kind, which is itself planned for the
least memory where it has to leave room for what nobody knows yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ebbtide.engine.after import AfterBackward
from ebbtide.engine.key import CallSlot
from ebbtide.engine.known_windows import KnownWindows
from ebbtide.measurement.step_record import Part, Taken
from ebbtide.planning.step_end import SCALARS_BYTES
from ebbtide.step.program import Program

__all__ = ["Learned"]


@dataclass(frozen=True)
class Learned:
    """What was learned of one model from its runs.

    Attributes:
        windows: what happens between the graphs of its steps.
        after: what is taken when their backwards have returned.
        aside: bytes to be kept free besides.
    """

    windows: KnownWindows = field(default_factory=KnownWindows)
    after: AfterBackward = field(default_factory=AfterBackward)
    aside: dict[CallSlot, int] = field(default_factory=dict[CallSlot, int])

    def is_known(self, call_slot: CallSlot, hooks: object) -> bool:
        """Whether it is known what user code takes outside of the two graphs of such a call."""
        return self.windows.has_loss_of(call_slot) and self.after.is_known(call_slot, hooks)

    def learn(
        self,
        call_slot: CallSlot,
        hooks: object,
        program: Program,
        made_bytes: int,
        parts: Mapping[Part, Taken],
        *,
        alone: bool = True,
    ) -> None:
        """A step has ended: note what user code took between its two graphs and after them.

        Args:
            call_slot: of the call.
            hooks: on parameters, then.
            program: of the step.
            made_bytes: state that optimizers have made since its forward, in hooks: it is resident from now on, also
                where as much has been freed meanwhile, such as gradients.
            parts: what each took.
            alone: whether no other forward was pending, whose backward comes after this one's.
        """
        if alone:
            self.after.learn(call_slot, hooks, parts[Part.AFTER], made_bytes)
        window, tangents = parts[Part.WINDOW], program.late_bytes - program.held_bytes
        peak, left = window.own_peak_bytes, window.own_left_bytes
        if peak - tangents <= SCALARS_BYTES:  # a loss that is divided or logged
            peak = left = 0
        self.windows.learn_loss(call_slot, peak, max(left - tangents, 0), program.returned_bytes)
        if Part.RETAINED in parts:
            self.windows.learn_after_retained(call_slot, parts[Part.RETAINED].peak_bytes)

    def put_aside(self, call_slot: CallSlot, over_bytes: int) -> None:
        """Keep so much more free in steps of ``call_slot``: a step took it that nothing of the above explains."""
        self.aside[call_slot] = self.aside.get(call_slot, 0) + over_bytes
