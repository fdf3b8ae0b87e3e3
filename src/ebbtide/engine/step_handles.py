"""The step handle: what a forward saves first, so that the backward knows which forward it belongs to.

A tensor without elements on the CPU whose shape is ``(0, executable, step)``: it takes no bytes, it is read without
a synchronisation, and it comes through whatever saved-tensor hooks do to tensors (``save_on_cpu``, clones), which
attributes of a tensor do not. Step 0 stands for any forward under such hooks: a checkpoint that repeats a forward
compares what it saves, shapes included.
"""

from __future__ import annotations

import torch

__all__ = ["ANY_STEP", "read_step_handle", "step_handle"]

ANY_STEP = 0


def step_handle(executable: int, pending: int) -> torch.Tensor:
    """The handle of a forward of executable number ``executable``."""
    return torch.empty((0, executable, pending), dtype=torch.uint8, device="cpu")


def read_step_handle(saved: torch.Tensor) -> tuple[int, int]:
    """The numbers of executable and step."""
    _, executable, step = saved.shape
    return executable, step
