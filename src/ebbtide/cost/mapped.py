"""Numbers in a file instead of in memory: for what is tried out where a budget has no room for it, on a CPU.

The file lies in the user's cache directory, has no name, and is gone with the last tensor over it. Its pages are the
system's, which writes them to the disk where memory is short.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import torch

from ebbtide.files import cache_directory

__all__ = ["mapped"]


def mapped(count: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` numbers in a file of their own, all zero.

    Raises:
        OSError: if there is no room on the disk, or no file can be made.
    """
    size = max(count, 1) * dtype.itemsize
    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and would be a signal at a write
            os.posix_fallocate(file.fileno(), 0, size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=dtype)[:count]
