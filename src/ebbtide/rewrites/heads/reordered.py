"""The gradient of a head's weight added up from rows, on request: the one rule whose results have not eager's bits.

A sum over N tokens is made of sums over slices of them, in another order than eager's. By how much that changes it is
measured on normal numbers and stated with the rewrite; nothing else of the step changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import zip_longest

import torch

from ebbtide.capture.joint import Captured
from ebbtide.cost.room import free_bytes
from ebbtide.rewrites.heads.facts import HeadSizes, weight_of_made_up
from ebbtide.rewrites.heads.find import worthwhile_heads
from ebbtide.rewrites.heads.forms import REORDERED, summed_forms_of
from ebbtide.rewrites.heads.rule import HeadRule, head_at
from ebbtide.rewrites.heads.slices import sum_of_rows
from ebbtide.rewrites.spans import spans
from ebbtide.step.rewrite import Rewrite
from ebbtide.torch_seams.fake_tensors import without_modes

__all__ = ["ReorderedHeadRule", "largest_difference", "stated"]

_CLASSES = 512
"""Of the vocabulary, on which the difference is measured: each is a sum of its own."""
_CHANGED = "the gradient of the weight has other last bits than eager's"


class ReorderedHeadRule(HeadRule):
    """See ``rewrites.rule``."""

    name: str = REORDERED

    def ways(self, step: Captured) -> Iterator[tuple[Rewrite, ...]]:
        """The same slices for all heads."""
        # A head that an earlier rule has replaced is still in the graph, where nobody reads it.
        heads = [each for each in worthwhile_heads(step) if each.hidden_gradient.users]
        seen: set[tuple[Rewrite, ...]] = set()
        for rewrites in zip_longest(*(map(_unknown, summed_forms_of(head)) for head in heads)):
            if None not in rewrites and rewrites not in seen:
                seen.add(rewrites)
                yield rewrites

    def instead(self, step: Captured, rewrite: Rewrite) -> Iterator[Rewrite]:
        """Larger slices of rows."""
        return map(_unknown, super().instead(step, rewrite))


def stated(step: Captured, rewrite: Rewrite) -> Rewrite:
    """``rewrite``, of this rule, with the largest difference seen on this device."""
    sizes = head_at(step, rewrite).sizes
    seen = largest_difference(sizes, rewrite["rows"])
    if seen is None:
        return rewrite
    return replace(rewrite, facts=(*rewrite.facts[:-1], f"{_CHANGED}: by up to {seen:.1e} of its largest number"))


def _unknown(rewrite: Rewrite) -> Rewrite:
    return replace(rewrite, facts=(*rewrite.facts, f"{_CHANGED}: by how much is not known here"))


def largest_difference(sizes: HeadSizes, rows: int) -> float | None:
    """Between the gradient of the weight added up from slices of ``rows`` and eager's, of the largest of eager's.

    On normal numbers; ``None`` where there is no room to find out.
    """
    classes = min(sizes.vocabulary, _CLASSES)
    logits = sizes.rows * classes * sizes.dtype.itemsize
    weight = classes * sizes.width * (sizes.dtype.itemsize + 4 * sizes.softmax.itemsize)
    if 2 * logits + 2 * sizes.hidden_bytes + weight > free_bytes():
        return None
    return _measured(sizes, rows, torch.get_num_threads())


@cache
def _measured(sizes: HeadSizes, rows: int, _threads: int) -> float:
    with without_modes(), torch.no_grad(), torch.autocast(sizes.device, enabled=False):
        gradient, h = weight_of_made_up(sizes, _CLASSES)
        whole = torch.mm(gradient.t(), h)
        sums = torch.zeros(whole.shape, dtype=sizes.softmax, device=whole.device)
        for a, b in spans(sizes.rows, rows):
            sum_of_rows(sums, gradient[a:b], h[a:b])
        whole, sums = whole.to(sizes.softmax), sums.to(sizes.dtype).to(sizes.softmax)
        return float((sums - whole).abs().max() / whole.abs().max())
