"""Batches that data loaders have given and somebody still has, whether or not the model gets them.

While a model is fitted, each batch is watched (``leftovers``). A tensor of a batch that is a part of something larger
is none of the loader's making: a data set that gives out views of itself was there before, and counts as little as it
did then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ebbtide.measurement.leftovers import give, watches_of
from ebbtide.measurement.resident import tensors_in
from ebbtide.torch_seams.loaders import each_batch
from ebbtide.torch_seams.patches import Patch
from ebbtide.torch_seams.storages import has_memory, storage_key

__all__ = ["watch_batches"]

_open: list[Patch] = []


def watch_batches(fitted: Callable[[], Iterable[object]]) -> None:
    """Watch the batches of every loader from now on, until no fitted model is left.

    Args:
        fitted: the fitted models.
    """
    if _open:
        return

    def watch(batch: object) -> None:
        if not any(True for _ in fitted()):
            while _open:
                _open.pop().close()
            return
        give(watches_of(_made_whole(batch)))

    _open.append(each_batch(watch).open())


def _made_whole(batch: object) -> list[torch.Tensor]:
    """One tensor of each storage that the tensors of ``batch`` fill."""
    parts: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors_in(batch):
        if has_memory(tensor):
            parts.setdefault(storage_key(tensor), []).append(tensor)
    return [
        tensors[0]
        for tensors in parts.values()
        if sum(each.nbytes for each in tensors) >= tensors[0].untyped_storage().nbytes()
    ]
