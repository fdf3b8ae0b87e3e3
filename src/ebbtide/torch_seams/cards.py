"""What a CUDA device can be told for which torch has no public name."""

from __future__ import annotations

import torch

__all__ = ["keep_waiting"]

_CYCLES_PER_SECOND = 2e9
"""About: clocks of today's cards are between 1 and 2.5 GHz."""


def keep_waiting(seconds: float) -> None:
    """Let the current stream do nothing for about so long; the host goes on.

    What is launched meanwhile runs without a gap afterwards (``torch.cuda._sleep``).
    """
    torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))
