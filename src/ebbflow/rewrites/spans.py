"""Slices of an axis: nearly equal, and none so short that a matrix product takes another kernel for it."""

from __future__ import annotations

from itertools import pairwise

__all__ = ["LEAST", "spans"]

LEAST = 16
"""Rows or columns of a slice. Shorter ones have been seen to take other kernels, whose sums are in another order."""


def spans(length: int, size: int) -> list[tuple[int, int]]:
    """Begin and end of slices of about ``size`` that cover ``length``, the last one no shorter than the others by two.

    ``length`` is one slice where it has fewer than twice :data:`LEAST` elements.
    """
    count = max(1, min(-(-length // max(size, 1)), length // LEAST))
    cuts = [length * index // count for index in range(count + 1)]
    return list(pairwise(cuts))
