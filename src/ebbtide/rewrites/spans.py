"""Slices of an axis, none so short that a matrix product takes another kernel for it."""

from __future__ import annotations

from itertools import pairwise

__all__ = ["LEAST", "STEP", "even_spans", "spans"]

LEAST = 16
"""Rows or columns of a slice. Shorter ones have been seen to take other kernels, whose sums are in another order."""
STEP = 64
"""Elements that elementwise kernels and sums take at a time, at most: two vectors of 512 bits of 2 bytes each. What is
left over goes another way, with other last bits, so it has to be the same elements in slices as in the whole."""


def spans(length: int, size: int) -> list[tuple[int, int]]:
    """Begin and end of slices of about ``size`` that cover ``length``, the last one no shorter than the others by two.

    ``length`` is one slice where it has fewer than twice :data:`LEAST` elements.
    """
    count = max(1, min(-(-length // max(size, 1)), length // LEAST))
    cuts = [length * index // count for index in range(count + 1)]
    return list(pairwise(cuts))


def even_spans(length: int, size: int) -> list[tuple[int, int]]:
    """Begin and end of slices of about ``size`` that begin at multiples of :data:`STEP` and cover ``length``.

    A remainder of fewer than :data:`LEAST` elements belongs to the slice before it.
    """
    size = max(STEP, size // STEP * STEP)
    cuts = [*range(0, max(length - LEAST, 0) + 1, size), length] if length else [0, 0]
    return list(pairwise(cuts))
