"""The device that a model is on, as the current one: a model on ``cuda:1`` is planned and measured there."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from ebbtide.measurement.resident import tensors_in

__all__ = ["cuda_index_of", "on_device_of"]


def cuda_index_of(roots: Iterable[object]) -> int | None:
    """Index of the CUDA device of the first tensor reachable from ``roots``; ``None`` if it is on no such device."""
    first = next(tensors_in(list(roots)), None)
    return first.device.index if first is not None and first.device.type == "cuda" else None


def on_device_of(roots: Iterable[object]) -> AbstractContextManager[object]:
    """A context in which the device of ``roots`` is the current one; on CPU it does nothing."""
    index = cuda_index_of(roots)
    return nullcontext() if index is None else torch.cuda.device(index)
