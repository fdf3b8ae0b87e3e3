"""What has to be kept free inside a budget for what no program shows."""

from __future__ import annotations

import os

from ebbtide.lower.fingerprints import SCRATCH_BYTES_CUDA
from ebbtide.step.program import Program
from ebbtide.step.unplanned import unplanned_bytes

__all__ = ["most_unsplit_bytes", "reserve_bytes", "unsplit_bytes"]

# Remembered over the first call and over the proven step, and the copy made to put it back.
_GENERATOR_STATE_BYTES = 3 * 5056


def reserve_bytes(program: Program, device: str, *, verify: bool | str) -> int:
    """Bytes to keep free for what the proven first step remembers; none if no step is proven.

    Args:
        program: of the step. What it changes of its inputs is copied (``snapshot``).
        device: ``"cpu"`` or ``"cuda"``.
        verify: whether steps are proven.
    """
    if not verify:
        return 0
    scratch = SCRATCH_BYTES_CUDA if device == "cuda" else 0
    changed = sum(program.buffers[b].bytes for b in program.copied_back)
    return changed + _GENERATOR_STATE_BYTES + scratch


_LARGE_BYTES = 2**20
_UNSPLIT_SHARE = 0.005
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def unsplit_bytes(program: Program) -> int:
    """Bytes to keep free for blocks that the card's allocator hands out larger than asked for.

    Of a free block it splits nothing off that were no more than 1 MiB (``CUDACachingAllocator.cpp``, ``kSmallSize``),
    and counts all of it: up to 1 MiB for each large tensor. Which of them depends on what it has free. On steps of a
    gigabyte or more that is some tenths of a percent, which is kept free; on smaller ones it can be more. Segments that
    can grow are cut exactly.

    Args:
        program: of the step.
    """
    return min(most_unsplit_bytes(program), int(_UNSPLIT_SHARE * unplanned_bytes(program)))


def most_unsplit_bytes(program: Program) -> int:
    """The most that it can be: for every large tensor, 0 where segments can grow."""
    if any("expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", "") for name in _SETTINGS):
        return 0
    return _LARGE_BYTES * sum(buffer.bytes > _LARGE_BYTES for buffer in program.buffers)
