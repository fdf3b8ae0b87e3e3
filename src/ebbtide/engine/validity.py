"""Whether a plan still holds: what it rests on, what a call asks of it, and the first thing in which the two differ.

1. A plan *rests on* what was asked for when it was made, on how the call's gradients are used, and on what was known.
   That is its :class:`Validity`, and never changes.
2. A call *asks* for room: for what is resident, for what happens between its two graphs and after them. That is its
   :class:`Demand`, made once for each call.
3. A plan *holds* for a call if nothing differs. What differs is said in the words that a user reads.

Another reason for which a plan no longer holds is added here: a field of both records, and a line of ``differs``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.capture.layouts import Layouts
from ebbtide.engine.configuration import Request
from ebbtide.engine.retained import Retained
from ebbtide.engine.user_window import UserWindow
from ebbtide.planning.step_end import StepEnd
from ebbtide.report.plan import Plan
from ebbtide.units import format_bytes

__all__ = ["LEAST_MEMORY", "Demand", "Validity", "leaves_more"]

LEAST_MEMORY = "least_memory"
"""The planner of the plan that leaves others all the room that there is."""


_BETWEEN = (
    "what runs between forward and backward takes {} more than the plan at hand has room for (what needs no gradient "
    "may run under torch.no_grad() or after the backward, and a loss in the forward)"
)
_MORE_AT_AN_END = "more is taken before the step or after it: {}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a call asks of a plan of its step, seen before it runs.

    Attributes:
        request: what is asked of every step of the model.
        resident_bytes: there before the call, and optimizer state that is to come.
        window: taken between the two graphs by user code, as far as it is known.
        retained: how the backward retains its graph; ``None`` if it does not.
        ends: what is taken before the forward or when the backward has returned, at one moment or another.
        guess: whether something that a plan depends on is not known: what a loss outside takes, a forward in flight
            that was planned without this one, or whether gradients are cleared before the backward.
        accumulating: whether all gradients are added to others.
        updates: whether the backward applies gradients.
        settings: of the optimizer that does; empty without one.
        checkpointed: whether somebody else's checkpoint or offload may be around the call.
        others_in_flight: whether forwards in flight keep anything.
        most_left_bytes: that may be left until the backward by the plans of forwards in flight, which were planned
            with room for this one; ``None`` if there are none.
        layouts: of the gradients of its outputs; ``None`` if they arrive as traced.
        aside_bytes: to be kept free, since a step has taken more than its plan predicted.
    """

    request: Request
    resident_bytes: int
    window: UserWindow | None
    retained: Retained | None
    ends: tuple[StepEnd, ...]
    guess: bool
    accumulating: bool
    updates: bool
    settings: tuple[object, ...]
    checkpointed: bool
    others_in_flight: bool
    layouts: Layouts | None
    most_left_bytes: int | None = None
    aside_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """What a plan rests on besides its step and its bytes.

    Attributes:
        request: number of the request that it was made for.
        tentative: whether it was planned for the least memory because something was not known yet.
        accumulates: whether it is for a step of which all gradients are added to others.
        updates: whether it is for calls whose backward applies gradients, or for those whose backward does not.
        settings: of the optimizer that does, with which its updates were priced; empty without one.
        moves: whether it moves buffers to other tiers.
        layouts: of the gradients of the outputs for which its step was traced; ``None`` for those of the capture.
        cleared_bytes: of gradients of earlier steps, which its user window gives back.
    """

    request: int
    tentative: bool
    accumulates: bool
    updates: bool
    settings: tuple[object, ...]
    moves: bool
    layouts: Layouts | None = None
    cleared_bytes: int = 0

    def differs(self, now: Demand, plan: Plan, lacking_bytes: int, lacking_in_window_bytes: int) -> str | None:
        """Why ``plan``, which rests on this, does not hold for a call that asks for ``now``; ``None`` if it does.

        Args:
            now: what the call asks for.
            plan: it.
            lacking_bytes: by which the plan would go over its budget with what is resident now.
            lacking_in_window_bytes: likewise, with what is known to happen between the two graphs.
        """
        found: list[str] = []
        if self.request != now.request.number:
            found.append(now.request.changed_since(self.request))
        if self.updates != now.updates:
            found.append("its backward applies gradients" if now.updates else "its backward applies no gradients")
        elif self.settings != now.settings:
            found.append("options of the optimizer have changed")
        if self.layouts != now.layouts:
            found.append("gradients of what the model returns arrive in another memory layout")
        if self.tentative and not now.guess:
            found.append("what happens between forward and backward, such as a loss outside the model, is measured now")
        if self.accumulates and not now.accumulating:
            found.append("gradients are no longer accumulated")
        if self.moves and now.checkpointed:
            found.append("it is inside of a checkpoint or saved-tensor hooks, where nothing can be moved")
        if lacking_bytes > 0:
            found.append(
                f"{_more_of(now)}: with that the plan at hand would go over the budget by {format_bytes(lacking_bytes)}"
            )
        elif lacking_in_window_bytes > 0:
            lacking = format_bytes(lacking_in_window_bytes)
            found.append("a backward retains its graph" if now.retained is not None else _BETWEEN.format(lacking))
        if not found:
            budget, resident = plan.budget_bytes, now.resident_bytes
            found += [_MORE_AT_AN_END.format(e.what) for e in now.ends if not e.held_by(budget, plan.program, resident)]
        return ", and ".join(found) or None


def leaves_more(now: Demand, planner: str, left_bytes: int) -> bool:
    """Whether a plan leaves more than forwards in flight have room for, and there may be one that does not."""
    return now.most_left_bytes is not None and left_bytes > now.most_left_bytes and planner != LEAST_MEMORY


def _more_of(now: Demand) -> str:
    """What is resident that was not, as far as can be told."""
    if now.others_in_flight:
        return "another forward is in flight"
    if now.accumulating:
        return "gradients are accumulated, or were not cleared before the forward"
    if now.aside_bytes:
        return "a step took more than its plan predicted"
    return "more is resident"
