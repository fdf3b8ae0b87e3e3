"""Which exchanges of its wrappers a rank has begun, in order.

All ranks of a group come to the same exchanges in the same order, or their collectives would not meet. So the journal
of one is the beginning of another's, and what it lacks is what it has to take part in for the other not to wait.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = ["Event", "Journal"]

_LAST = 8
"""Ranks are apart by the exchanges of one step at the most: in its backward's, one has come out of all before."""


class Event(NamedTuple):
    """An exchange that a rank has begun.

    Attributes:
        kind: before a forward with gradients, or one without, which has buffers alone to exchange; or in a backward.
        wrapper: number of the wrapper among those of the group.
    """

    kind: Literal["forward", "buffers", "backward"]
    wrapper: int


@dataclass
class Journal:
    """What one rank has begun: how many exchanges in all, and the last few."""

    count: int = 0
    last: deque[Event] = field(default_factory=lambda: deque(maxlen=_LAST))

    def begin(self, event: Event) -> None:
        """Note an exchange that begins now."""
        self.count += 1
        self.last.append(event)

    def take_back(self, event: Event) -> None:
        """Note that nothing was sent in the last ``event`` that was begun."""
        kept = list(self.last)
        if event in kept:
            del kept[len(kept) - 1 - kept[::-1].index(event)]
            self.count -= 1
            self.last = deque(kept, maxlen=_LAST)

    def missing(self, target: Journal) -> list[Event]:
        """What this rank has not begun of what is in ``target``; nothing if that is more than anybody remembers."""
        apart = target.count - self.count
        return list(target.last)[len(target.last) - apart :] if 0 < apart <= len(target.last) else []

    def to_text(self) -> str:
        """As it is published."""
        return json.dumps([self.count, list(self.last)])

    @staticmethod
    def from_text(text: str) -> Journal:
        """As another rank has published it."""
        count, last = json.loads(text)
        return Journal(count, deque((Event(*each) for each in last), maxlen=_LAST))
