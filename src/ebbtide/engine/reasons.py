"""Why a call waits: what is told of a step that is captured, or planned again for the capture that there is.

A plan is made again where none of those at hand holds (``plans.holding``). What stands in their way is looked
for in this order, and where a loss is known now that was not, what is resident is told of as well:

1. there is none: the budget was set anew;
2. something that was not known when they were made is known now: a loss outside, another forward;
3. gradients are made anew, and the plans at hand are for gradients that are added to others;
4. they have no room for what is resident;
5. more happens between the two graphs than they leave room for: user code, another forward, a graph that is retained.
"""

from __future__ import annotations

from ebbtide.engine.circumstances import Circumstances
from ebbtide.engine.compiled import Call
from ebbtide.engine.model import FittedModel
from ebbtide.engine.plans import is_guess, resident_bytes
from ebbtide.engine.step import Step
from ebbtide.units import format_bytes

__all__ = ["CHANGED", "FIRST", "OTHER_WAY", "reason_of"]

FIRST = "this takes a while, once for each shape of inputs"
CHANGED = (
    "captured again, since something besides its inputs has changed that the step depends on (a mode, an attribute, "
    "a hook)"
)

OTHER_WAY = "captured for another way through the model, which asks for values of its inputs: {}, and is not here"


def reason_of(model: FittedModel, step: Step, call: Call, now: Circumstances) -> str:
    """Why ``call``, of ``step``, has no plan that holds."""
    if step.captured is None:
        other = model.answered_otherwise(call, now)
        if other is not None:
            return OTHER_WAY.format(other)
        return CHANGED if model.knows(now) and not step.capture.made else FIRST
    return f"planned again, since {_news(model, step, now)}"


def _news(model: FittedModel, step: Step, now: Circumstances) -> str:
    if not step.executables:
        return "another budget was set"
    measured = ""
    if any(each.provisional for each in step.executables) and not is_guess(model, step, now):
        measured = "what happens between forward and backward, such as a loss outside the model, is measured now"
    own = [each for each in step.executables if now.accumulating or not each.accumulates]
    if not own:
        return measured or "gradients are no longer accumulated"
    resident = resident_bytes(step, now)
    short = min(resident + each.needs_bytes - each.plan.budget_bytes for each in own)
    if short <= 0:
        more = "a backward retains its graph" if model.retains(now) else "more happens between forward and backward"
        return measured or more
    if now.flying_bytes:
        what = "another forward is in flight"
    elif now.accumulating:
        what = "gradients are accumulated, or were not cleared before the forward"
    else:
        what = "more is resident"
    full = f"{what}: with that the plans at hand would go over the budget by {format_bytes(short)}"
    return f"{measured}, and {full}" if measured else full
