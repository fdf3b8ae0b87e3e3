"""The ticket: what a forward saves first, so that the backward knows which forward it belongs to.

A tensor without elements on the CPU whose shape is ``(0, executable, flight)``: it takes no bytes, it is read without
a synchronisation, and it comes through whatever saved-tensor hooks do to tensors (``save_on_cpu``, clones), which
attributes of a tensor do not. Flight 0 stands for any forward under such hooks: a checkpoint that repeats a forward
compares what it saves, shapes included.
"""

from __future__ import annotations

import torch

__all__ = ["ANY_FLIGHT", "read_ticket", "ticket"]

ANY_FLIGHT = 0


def ticket(executable: int, flight: int) -> torch.Tensor:
    """The ticket of a forward of executable number ``executable``."""
    return torch.empty((0, executable, flight), dtype=torch.uint8, device="cpu")


def read_ticket(saved: torch.Tensor) -> tuple[int, int]:
    """The numbers of executable and flight."""
    _, executable, flight = saved.shape
    return executable, flight
