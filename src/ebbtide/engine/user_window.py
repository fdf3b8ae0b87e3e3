"""The user window of a step: what code outside of the model takes between its forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UserWindow"]


@dataclass(frozen=True, slots=True)
class UserWindow:
    """Bytes between the two graphs of a step, above the level that its forward left.

    Attributes:
        peak_bytes: at the most.
        held_bytes: kept until the step's end; negative if more is given back, such as gradients of earlier steps.
        least_bytes: the peak if whatever else runs there were planned for the least memory.
    """

    peak_bytes: int
    held_bytes: int
    least_bytes: int

    def joined(self, other: UserWindow) -> UserWindow:
        """What covers both."""
        return UserWindow(
            max(self.peak_bytes, other.peak_bytes),
            max(self.held_bytes, other.held_bytes),
            max(self.least_bytes, other.least_bytes),
        )
