"""What one rewrite would do to a step's floor, and what it costs: a part of the doctor's findings."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Rewriting"]


@dataclass(frozen=True, slots=True)
class Rewriting:
    """One way to rewrite a step, or something that looks as if it could be rewritten.

    Attributes:
        what: the rewrites in words; of what is left, where it is.
        floor_bytes: of any budget for the rewritten step; ``None`` of what is left.
        seconds: that the rewritten step takes more than the captured one, both unplanned; ``None`` of what is left.
        why_not: why no plan may use it; empty where one may.
    """

    what: str
    floor_bytes: int | None
    seconds: float | None
    why_not: str
