"""What is known of the user window, between forward and backward: a loss outside, other forwards, a retained graph.

1. What is known is known of a *slot* (``key``): two calls of one key in a row, as in a siamese network, have two.
2. A loss outside is measured in a first step of each slot, and counts for more where a later one has taken more.
   Another forward is known by its own plan: it takes that plan's peak while it runs, and leaves what crosses its
   boundary, or the gradients that its backward has made by then; its arguments come on top.
3. What is said last of one slot by another replaces what was said before, so what is known settles when plans do.
4. Two forwards *train together* if one of them was pending when the other had its backward, or its own came later.
   Those that never did are an evaluation that has forgotten ``no_grad``, once perhaps: plans leave room for them where
   there is room, and no training is refused for them.
5. A loss outside that was not measured for a shape is *likely* to take, for each byte that the model returns, the most
   that one of another shape took; of more bytes it takes more by their square, as a loss of pairs does.
6. Gradients of earlier steps may be *cleared* in the window (``loss = model(x); optimizer.zero_grad();
   loss.backward()``). A first step, which has none, sees the call itself; a later one whether they are gone when its
   backward begins, and a first one of another shape goes by what these have told. Where they once were not, nobody
   counts on that any more.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace

from ebbtide.engine.key import CallSlot
from ebbtide.engine.retained import Retained
from ebbtide.engine.user_window import UserWindow

__all__ = ["Cleared", "KnownWindows"]


class Cleared(enum.Enum):
    """What is known of gradients that are there when a forward begins (definition 6)."""

    NEVER_SEEN = "no step has told"
    UNASKED = "a step that had none has seen no call that clears them before the backward"
    ASKED = "they are to be cleared before the backward, as a call in a step that had none says"
    SEEN = "they were cleared before the backward"
    KEPT = "some were there in the backward"


@dataclass
class KnownWindows:
    """What the user windows of one model's steps take, as far as it was learned (definition 2)."""

    _losses: dict[CallSlot, UserWindow] = field(default_factory=dict[CallSlot, UserWindow])
    _returned: dict[CallSlot, int] = field(default_factory=dict[CallSlot, int])
    _forwards: dict[CallSlot, dict[CallSlot, UserWindow]] = field(
        default_factory=dict[CallSlot, "dict[CallSlot, UserWindow]"]
    )
    _retained: dict[CallSlot, Retained] = field(default_factory=dict[CallSlot, Retained])
    _cleared: dict[CallSlot, Cleared] = field(default_factory=dict[CallSlot, Cleared])
    _together: set[tuple[CallSlot, CallSlot]] = field(default_factory=set[tuple[CallSlot, CallSlot]])

    def of(self, call_slot: CallSlot, cleared_bytes: int = 0) -> UserWindow | None:
        """All that happens between the graphs of calls of ``call_slot``, as far as it is known.

        Args:
            call_slot: of the calls.
            cleared_bytes: of gradients of earlier steps that go there.
        """
        found = self._taken(call_slot)
        if not cleared_bytes:
            return found
        found = found or UserWindow(0, 0, 0)
        return replace(found, held_bytes=found.held_bytes - cleared_bytes)

    def _taken(self, call_slot: CallSlot) -> UserWindow | None:
        known = [*self._forwards.get(call_slot, {}).values()]
        if call_slot in self._losses:
            known.append(self._losses[call_slot])
        if not known:
            return None
        found = known[0]
        for each in known[1:]:
            found = found.joined(each)
        return found

    def has_loss_of(self, call_slot: CallSlot) -> bool:
        """Whether the loss outside was measured."""
        return call_slot in self._losses

    def expects_forwards(self, call_slot: CallSlot) -> bool:
        """Whether another forward is known to start before the backward."""
        return call_slot in self._forwards

    def expected(self, call_slot: CallSlot) -> frozenset[CallSlot]:
        """The slots of forwards that are known to start before the backward of calls of ``call_slot``."""
        return frozenset(self._forwards.get(call_slot, ()))

    def likely_loss(self, call_slot: CallSlot, returned_bytes: int) -> UserWindow | None:
        """What the loss outside of a call is likely to take that returns so much; ``None`` if nothing is known."""
        found: UserWindow | None = None
        for other, loss in self._losses.items():
            if (known := self._returned[other]) and other.depth == call_slot.depth:
                times = returned_bytes / known * max(1.0, returned_bytes / known)
                peak = math.ceil(loss.peak_bytes * times)
                likely = UserWindow(peak, math.ceil(loss.held_bytes * times), peak)
                found = likely if found is None else found.joined(likely)
        return found

    def learn_loss(self, call_slot: CallSlot, peak_bytes: int, held_bytes: int, returned_bytes: int) -> None:
        """What user code took in a step whose forward returned so much."""
        self._returned[call_slot] = returned_bytes
        found, known = UserWindow(peak_bytes, held_bytes, peak_bytes), self._losses.get(call_slot)
        self._losses[call_slot] = found if known is None else known.joined(found)

    def retained(self, call_slot: CallSlot) -> Retained | None:
        """How backwards of calls of ``call_slot`` retain their graphs, if any did."""
        return self._retained.get(call_slot)

    def learn_retained(self, call_slot: CallSlot, *, again: bool) -> bool:
        """A backward retains its graph, or comes ``again`` through it; whether that is news."""
        known = self._retained.get(call_slot)
        if known is not None and (known.again or not again):
            return False
        self._retained[call_slot] = Retained(again=again) if known is None else replace(known, again=again)
        return True

    def knows_after_retained(self, call_slot: CallSlot) -> bool:
        """Whether backwards retain no graph, or it was measured what user code takes after those."""
        known = self._retained.get(call_slot) if self._retained else None
        return known is None or known.after_bytes is not None

    def learn_after_retained(self, call_slot: CallSlot, taken_bytes: int) -> None:
        """User code took so much after a backward that retained its graph, before that was gone."""
        known = self._retained.get(call_slot, Retained())
        self._retained[call_slot] = replace(known, after_bytes=max(taken_bytes, known.after_bytes or 0))

    def cleared(self, call_slot: CallSlot) -> Cleared:
        """Whether gradients of earlier steps are cleared between the graphs of calls of ``call_slot``."""
        if (known := self._cleared.get(call_slot)) is not None:
            return known
        others = {found for each, found in self._cleared.items() if each.depth == call_slot.depth}
        some = not others.isdisjoint((Cleared.ASKED, Cleared.SEEN))
        return Cleared.ASKED if some and Cleared.KEPT not in others else Cleared.NEVER_SEEN

    def learn_cleared(self, call_slot: CallSlot, found: Cleared) -> None:
        """A step of ``call_slot`` has told; that some were kept stands."""
        if self._cleared.get(call_slot) is not Cleared.KEPT:
            self._cleared[call_slot] = found

    def learn_forward(self, call_slot: CallSlot, other: CallSlot, window: UserWindow) -> None:
        """A call of ``other``, of any fitted model, starts before the backward of one of ``call_slot``."""
        self._forwards.setdefault(call_slot, {})[other] = window

    def learn_together(self, call_slot: CallSlot, other: CallSlot) -> None:
        """A call of ``call_slot`` and one of ``other``, which started later, train together (definition 4)."""
        self._together.add((call_slot, other))

    def has_untrained(self, call_slot: CallSlot) -> bool:
        """Whether forwards are known to start before the backward of ``call_slot`` that train nothing with it."""
        return any((call_slot, other) not in self._together for other in self._forwards.get(call_slot, ()))

    def forget_untrained(self, call_slot: CallSlot) -> bool:
        """Forget these; whether there were any."""
        known = self._forwards.get(call_slot, {})
        untrained = [other for other in known if (call_slot, other) not in self._together]
        for other in untrained:
            del known[other]
        if not known:
            self._forwards.pop(call_slot, None)
        return bool(untrained)
