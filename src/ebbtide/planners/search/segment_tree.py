"""Bytes per stage under range additions: a tree of maxima with additions that are never pushed down.

``top[v]`` is the maximum of the leaves under node ``v`` counting the additions stored at and below ``v``;
``add[v]`` is the addition stored at ``v``. Node 1 is the root, leaf ``i`` is node ``size + i``. All
functions are compiled and take both arrays; ranges are inclusive.
"""

from __future__ import annotations

from ebbtide.planners.search.jit import Words, apart, inner
from ebbtide.planners.search.layout import H_ADD, H_TOP, H_TREE_SIZE

__all__ = ["add_range", "argmax", "max_range", "value"]


@apart
def add_range(m: Words, first: int, last: int, amount: int) -> None:
    """Add ``amount`` bytes to stages ``first..last``; nothing if the range is empty."""
    if first > last or amount == 0:
        return
    size, top, add = m[H_TREE_SIZE], m[H_TOP], m[H_ADD]
    left, right = first + size, last + size
    m[top + left] += amount
    if left != right:
        m[top + right] += amount
        while left >> 1 != right >> 1:
            if left & 1 == 0:
                m[top + (left ^ 1)] += amount
                m[add + (left ^ 1)] += amount
            if right & 1 == 1:
                m[top + (right ^ 1)] += amount
                m[add + (right ^ 1)] += amount
            left >>= 1
            right >>= 1
            m[top + left] = max(m[top + 2 * left], m[top + 2 * left + 1]) + m[add + left]
            m[top + right] = max(m[top + 2 * right], m[top + 2 * right + 1]) + m[add + right]
    left >>= 1
    while left >= 1:
        m[top + left] = max(m[top + 2 * left], m[top + 2 * left + 1]) + m[add + left]
        left >>= 1


@inner
def max_range(m: Words, first: int, last: int) -> int:
    """The most bytes in stages ``first..last``; 0 if the range is empty."""
    if first > last:
        return 0
    size, top, add = m[H_TREE_SIZE], m[H_TOP], m[H_ADD]
    left, right = first + size, last + size
    best_left, best_right = m[top + left], m[top + right]
    while left >> 1 != right >> 1 and left != right:
        if left & 1 == 0:
            best_left = max(best_left, m[top + (left ^ 1)])
        if right & 1 == 1:
            best_right = max(best_right, m[top + (right ^ 1)])
        left >>= 1
        right >>= 1
        best_left += m[add + left]
        best_right += m[add + right]
    best = max(best_left, best_right)
    left >>= 1
    while left >= 1:
        best += m[add + left]
        left >>= 1
    return best


@apart
def value(m: Words, stage: int) -> int:
    """The bytes of one stage."""
    size, top, add = m[H_TREE_SIZE], m[H_TOP], m[H_ADD]
    node = stage + size
    total = m[top + node]
    node >>= 1
    while node >= 1:
        total += m[add + node]
        node >>= 1
    return total


@inner
def argmax(m: Words) -> int:
    """The first stage with the most bytes."""
    size, top = m[H_TREE_SIZE], m[H_TOP]
    node = 1
    while node < size:
        node = 2 * node if m[top + 2 * node] >= m[top + 2 * node + 1] else 2 * node + 1
    return node - size
