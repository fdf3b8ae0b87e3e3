"""What moved in a step, and how long that took."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Traffic"]

_Kind = Literal["transfer", "waited"]


@dataclass(slots=True)
class Traffic:
    """What moved, by the clocks of the lanes and of what computes.

    Attributes:
        out_bytes: copied to tiers.
        in_bytes: copied back.
        transfer_seconds: that the copies took on their lanes.
        waited_seconds: that the computing thread, or the device's stream, waited for them.
        timed: whether the seconds were taken. On CUDA that needs events and, in the end, a wait of the host: they are
            those of the step that was measured.
    """

    out_bytes: int = 0
    in_bytes: int = 0
    transfer_seconds: float = 0.0
    waited_seconds: float = 0.0
    timed: bool = True
    _clocks: list[tuple[_Kind, Callable[[], float]]] = field(
        default_factory=list["tuple[_Kind, Callable[[], float]]"], repr=False
    )

    @property
    def hidden_share(self) -> float:
        """Share of the transfers' seconds for which nobody waited; 1 if nothing moved, no number if not timed."""
        if not self.timed and (self.out_bytes or self.in_bytes):
            return math.nan
        return max(1.0 - self.waited_seconds / self.transfer_seconds, 0.0) if self.transfer_seconds else 1.0

    def add_later(self, kind: _Kind, clock: Callable[[], float]) -> None:
        """Seconds that a device is still taking; ``clock`` waits until it knows them."""
        self._clocks.append((kind, clock))

    def read_clocks(self) -> None:
        """Wait for the device and add the seconds that it took."""
        clocks, self._clocks = self._clocks, []
        for kind, clock in clocks:
            if kind == "transfer":
                self.transfer_seconds += clock()
            else:
                self.waited_seconds += clock()
