"""Memory over a step as the allocator counted it: what is drawn on top of a prediction.

Definitions:
1. A *curve* has two parts, the forward and the backward. Each is cut into spans in which equally many bytes are handed
   out, and a span's value is the most that was there once its bytes were, so no peak is lost.
2. A prediction knows when it hands out how many bytes too. So whoever draws a curve on top of one puts each span where
   the prediction hands out the same share: what is compared is the same place in the step, not the same second. Ops
   take other shares of the time while every block is recorded than they are predicted to take.
3. What lies outside of both parts, such as ``optimizer.step()``, is not in a curve.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Curve", "Event", "Marks", "curve_of"]

SPANS = 1000  # of each part


class Event(Protocol):
    """Bytes taken, or given back if negative."""

    @property
    def time_ns(self) -> int:
        """When."""
        ...

    @property
    def bytes(self) -> int:
        """How many."""
        ...


@dataclass(frozen=True, slots=True)
class Marks:
    """When a step began, passed its boundary and ended, on the clock of ``time.time_ns``."""

    begin_ns: int
    boundary_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes over a step, resident part included: definition 1."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    def above(self, bytes_more: int) -> Curve:
        """This curve with ``bytes_more`` under it."""
        return Curve(tuple(b + bytes_more for b in self.forward), tuple(b + bytes_more for b in self.backward))


def curve_of(events: Iterable[Event], marks: Marks, start_bytes: int, spans: int = SPANS) -> Curve | None:
    """The curve of a step.

    Args:
        events: in order of time.
        marks: of the step.
        start_bytes: level before the first event.
        spans: of each part.

    Returns:
        ``None`` where nothing was recorded, as on CUDA.
    """
    ordered = [(each.time_ns, each.bytes) for each in events]
    if not ordered:
        return None
    level = start_bytes + sum(size for when, size in ordered if when < marks.begin_ns)
    forward = [size for when, size in ordered if marks.begin_ns <= when < marks.boundary_ns]
    backward = [size for when, size in ordered if marks.boundary_ns <= when < marks.end_ns]
    return Curve(_highest(forward, level, spans), _highest(backward, level + sum(forward), spans))


def _highest(sizes: list[int], level: int, spans: int) -> tuple[int, ...]:
    """Per span of one part, the most that was there: definition 1. Before it there was ``level``."""
    total = sum(size for size in sizes if size > 0)
    found = [0 if total else level] * spans
    handed_out = 0
    for size in sizes:
        level += size
        if size > 0:
            first, last = spans * handed_out // total, (spans * (handed_out + size) - 1) // total
            for span in range(first, last + 1):
                found[span] = max(found[span], level)
            handed_out += size
    return tuple(found)
