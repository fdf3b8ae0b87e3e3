"""Real text that every Python carries: the standard library's own sources, in a fixed order."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from ebbtide.errors import UsageError

__all__ = ["batches", "stdlib_bytes"]

LARGEST_BYTES = 4 * 2**20  # more than a short training sees


def stdlib_bytes() -> bytes:
    """The standard library's top-level modules, one after the other, at most 4 MiB.

    Raises:
        UsageError: if this Python carries no sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:LARGEST_BYTES]
    if not text:
        raise UsageError(f"this Python has no sources in {folder}; use one that brings its standard library's files")
    return text


def batches(count: int, batch: int, length: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``count`` batches of the sources' bytes: tokens and the tokens that follow them.

    Returns:
        Pairs of int64 tensors of shape ``(batch, length)``, values 0 to 255.
    """
    text = torch.frombuffer(bytearray(stdlib_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(count):
        starts = torch.randint(len(text) - length - 1, (batch,), generator=generator)
        rows = torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()
        found.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return found
