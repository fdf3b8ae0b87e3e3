"""Memory over a step by category: what is stacked on pages and plots.

Definitions, the first that holds:
1. *Reloaded* and *again* are stays that come later than a buffer's first: from slower memory, or made again.
2. *Gradients* are buffers that the backward leaves; *backward* is all else that it makes, and tangents.
3. *Kept* are results of the forward that are there when the boundary is passed; *brief* are its others.
4. *Other* is what a moment takes besides stays. *Resident* is there before the step.
"""

from __future__ import annotations

import enum

import numpy as np

from ebbtide.report.records.course import Course, Stay
from ebbtide.step.arrays import Ints
from ebbtide.step.program import Program

__all__ = ["Category", "stack_of"]


class Category(enum.Enum):
    """From the bottom up; the value is the word for people."""

    RESIDENT = "resident before the step"
    KEPT = "kept for the backward"
    BRIEF = "other results of the forward"
    AGAIN = "recomputed"
    RELOADED = "fetched back"
    GRADIENTS = "gradients of weights"
    BACKWARD = "other results of the backward"
    OTHER = "workspace and other"


def stack_of(program: Program, course: Course, resident_bytes: int) -> dict[Category, Ints]:
    """Per category, bytes at every moment; they add up to the moments' bytes and the resident part."""
    count = len(course.moments)
    change = {category: np.zeros(count + 1, np.int64) for category in Category}
    gradients, boundary = frozenset(program.gradients), course.boundary
    for stay in course.stays:
        size, category = program.buffers[stay.buffer].bytes, _category(program, stay, gradients, boundary)
        change[category][stay.first] += size
        change[category][stay.last + 1] -= size
    stack = {category: np.cumsum(each)[:count] for category, each in change.items()}
    total = np.array([moment.bytes for moment in course.moments], np.int64)
    stack[Category.OTHER] = total - sum(stack.values(), np.zeros(count, np.int64))
    stack[Category.RESIDENT] = np.full(count, resident_bytes, np.int64)
    return stack


def _category(program: Program, stay: Stay, gradients: frozenset[int], boundary: int) -> Category:
    if stay.reloaded:
        return Category.RELOADED
    if stay.later:
        return Category.AGAIN
    if stay.buffer in gradients:
        return Category.GRADIENTS
    producer = program.buffers[stay.buffer].producer
    if producer is None or producer >= program.boundary:
        return Category.BACKWARD
    return Category.KEPT if stay.first < boundary <= stay.last else Category.BRIEF
