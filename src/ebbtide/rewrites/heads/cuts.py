"""Which rows of the logits a loss reads: all, or of every run of some length those from one place to another.

``logits[:, :-1]`` of B x T x V reads, of every T rows, the first T - 1. A *cut* is (length, begin, end), or empty where
all rows are read. What a loss does not read has a gradient of zero, which takes part in the sums over rows: so rows are
spread over again before those sums, and never left out of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["clear_unread", "read", "rows_read", "spread"]


def rows_read(rows: int, cut: Sequence[int]) -> int:
    """How many of ``rows`` rows are read."""
    if not cut:
        return rows
    length, begin, end = cut
    return rows // length * (end - begin)


def read(values: Tensor, cut: Sequence[int]) -> Tensor:
    """Those of the rows that are read, of ``values``, whose first dimension are rows."""
    if not cut:
        return values
    length, begin, end = cut
    return values.unflatten(0, (-1, length))[:, begin:end].flatten(0, 1)


def spread(values: Tensor, cut: Sequence[int], rows: int, other: float) -> Tensor:
    """The way back from :func:`read` for a vector: ``other`` is at the rows that are not read."""
    if not cut:
        return values
    length, begin, end = cut
    whole = torch.full((rows,), other, dtype=values.dtype, device=values.device)
    whole.view(-1, length)[:, begin:end] = values.view(-1, end - begin)
    return whole


def clear_unread(values: Tensor, cut: Sequence[int], first: int) -> Tensor:
    """``values``, of rows from ``first`` on, with zeros at the rows that are not read: there, and not in a copy."""
    if cut:
        length, begin, end = cut
        places = torch.arange(first, first + values.shape[0], device=values.device) % length
        values.masked_fill_(((places < begin) | (places >= end)).unsqueeze(1), 0)
    return values
