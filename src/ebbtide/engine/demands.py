"""What a call asks of a plan: what :mod:`~ebbtide.engine.validity` compares with what plans rest on."""

from __future__ import annotations

from collections.abc import Iterator

from ebbtide.engine.after import hooks_end
from ebbtide.engine.call_context import CallContext
from ebbtide.engine.configuration import Request
from ebbtide.engine.known_windows import Cleared, KnownWindows
from ebbtide.engine.learned import Learned
from ebbtide.engine.optimizer_link import OptimizerLink
from ebbtide.engine.pending_steps import most_left_bytes
from ebbtide.engine.step import Step
from ebbtide.engine.validity import Demand
from ebbtide.planning.step_end import StepEnd

__all__ = ["bytes_to_be_cleared", "clearing_is_asked", "demand_of", "waits_for_a_loss"]

_ASKED = "the questions that the model asks of values of its inputs"
_ASK_OUTSIDE = "ask it outside of the model and give the forward what comes of it as a Python bool"


def demand_of(step: Step, now: CallContext, *, request: Request, learned: Learned, optimizers: OptimizerLink) -> Demand:
    """What a call asks of a plan of ``step``.

    Args:
        step: that may serve the call.
        now: what surrounds the call.
        request: what is asked of the model's steps.
        learned: of the code around them.
        optimizers: of the model.
    """
    windows, in_backward = learned.windows, optimizers.in_backward
    return Demand(
        request=request,
        resident_bytes=step.resident_bytes(now) + optimizers.state_to_come_bytes(),
        window=windows.of(now.call_slot, bytes_to_be_cleared(now, windows)),
        retained=windows.retained(now.call_slot),
        ends=tuple(_ends_of(step, now, learned, optimizers)),
        guess=waits_for_a_loss(step, now, windows)
        or (bool(now.flying_bytes) and not now.was_expected)
        or clearing_is_asked(now),
        accumulating=now.accumulating,
        updates=now.updates,
        settings=in_backward.settings if in_backward is not None and now.updates else (),
        checkpointed=now.checkpointed,
        others_in_flight=bool(now.flying_bytes),
        most_left_bytes=most_left_bytes(now.call_slot, now.inputs, now.pending) if now.pending else None,
        layouts=step.piece.layouts,
        aside_bytes=learned.aside.get(now.call_slot, 0),
    )


def _ends_of(step: Step, now: CallContext, learned: Learned, optimizers: OptimizerLink) -> Iterator[StepEnd]:
    """What is taken before a call's forward or when its backward has returned, whatever the plan: one or another."""
    own = optimizers.end_of(now)
    if own is not None:
        yield own
    held = 0 if own is None or optimizers.offloaded is None else own.held_bytes
    yield hooks_end(learned.after.bytes(now.call_slot, now.hooks), held)
    yield StepEnd(step.piece.capture.asked_bytes, held, what=_ASKED, remedies=(_ASK_OUTSIDE,), before=True)


def bytes_to_be_cleared(now: CallContext, windows: KnownWindows) -> int:
    """Bytes of the gradients that are there and go before the backward, as earlier ones have."""
    return now.gradient_bytes if windows.cleared(now.call_slot) is Cleared.SEEN else 0


def clearing_is_asked(now: CallContext) -> bool:
    """Whether gradients are there that are to be cleared before the backward, as far as one call says."""
    return now.cleared is Cleared.ASKED and bool(now.gradient_bytes)


def waits_for_a_loss(step: Step, now: CallContext, windows: KnownWindows) -> bool:
    """Whether the loss is outside of the model, and nothing is known of what it takes."""
    return not windows.has_loss_of(now.call_slot) and step.piece.loss_is_outside
