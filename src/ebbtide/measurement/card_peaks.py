"""The peak that a card's allocator keeps, asked about a part of a step, and left to whoever else reads it.

1. Of a part there is a peak only if the statistic is *reset* at its beginning: what it was is gone, and whoever resets
   it before a step and reads it afterwards (``torch.cuda.max_memory_allocated``) would be told less than the step took.
2. So what it was is kept, and *given back* at the end: free blocks that the allocator has already are taken until as
   much is allocated as was at the peak, and let go at once. No memory of the card is asked for. Where the blocks do not
   do, the statistic is lower than it was, by up to 1 MiB where one would have to be split; never higher.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

__all__ = ["allocated_peak", "give_back_peak", "levels", "peaks_kept", "reset_peak"]

_UNSPLIT_BYTES = 2**20
"""A rest of so many bytes or fewer is handed out with the block."""
_ROUNDED_BYTES = 512


class _OfThread(threading.local):
    """The highest that was reset while :func:`peaks_kept` is open."""

    kept: int | None = None


_here = _OfThread()


def allocated_peak() -> int:
    """Bytes at the highest point since the statistic of the current device was reset."""
    return torch.cuda.max_memory_allocated()


def levels() -> tuple[int, int]:
    """The peak of the current device, as :func:`allocated_peak`, and what is allocated, in one question."""
    found = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
    return found["peak"], found["current"]


def reset_peak() -> int:
    """Let the statistic begin anew; what it was, for :func:`give_back_peak`."""
    before = allocated_peak()
    if _here.kept is not None:
        _here.kept = max(_here.kept, before)
    torch.cuda.reset_peak_memory_stats()
    return before


@contextlib.contextmanager
def peaks_kept() -> Iterator[None]:
    """While open, what is reset on this thread is given back when it closes (definition 2)."""
    if _here.kept is not None:
        yield
        return
    _here.kept = allocated_peak()
    try:
        yield
    finally:
        kept, _here.kept = _here.kept, None
        give_back_peak(kept)


def give_back_peak(peak_bytes: int) -> None:
    """Let the statistic be ``peak_bytes`` again, if it is less (definition 2)."""
    # Out of memory among them, and a release whose snapshots say it otherwise: then it is as low as it is.
    with contextlib.suppress(RuntimeError, LookupError, TypeError):
        if allocated_peak() < peak_bytes:
            taken = [_take(size) for size in _whole_blocks(_free_blocks(), peak_bytes - torch.cuda.memory_allocated())]
            del taken


def _take(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def _whole_blocks(free: list[int], missing: int) -> list[int]:
    """Sizes to ask for, so that blocks of these free ones make up ``missing`` bytes or a little less."""
    asked: list[int] = []
    left: list[int] = []
    for size in sorted(free, reverse=True):
        if size <= missing:
            asked.append(size)
            missing -= size
        else:
            left.append(size)
    for size in left:  # of those, the allocator takes the smallest that is large enough
        if 0 < size - missing <= _UNSPLIT_BYTES:
            missing = size - _UNSPLIT_BYTES - _ROUNDED_BYTES
    if missing > _UNSPLIT_BYTES and any(size >= missing for size in left):
        asked.append(missing // _ROUNDED_BYTES * _ROUNDED_BYTES)
    return asked


def _free_blocks() -> list[int]:
    """Bytes of the free blocks from which the allocator serves the current stream.

    It looks for up to 1 MiB in small segments alone, and for more in large ones.
    """
    stream, device = torch.cuda.current_stream().cuda_stream, torch.cuda.current_device()
    return [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device and segment["stream"] == stream and tuple(segment["segment_pool_id"]) == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "inactive" and (block["size"] > _UNSPLIT_BYTES) == (segment["segment_type"] == "large")
    ]
