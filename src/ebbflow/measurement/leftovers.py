"""What still lives of what fitted models have returned, on CPU, where the allocator keeps no total.

``out = model(x); out["loss"].backward()`` in a loop keeps ``out`` alive through the next forward; so do logged losses,
hidden states and outputs of a validation that somebody collects. They are resident for every later step of any fitted
model, and so are constants that captures hold. Nothing is kept alive here.

Every call asks, and thousands of losses may be collected: so each question looks again at a few only, and takes the
others as alive. Too much may be counted that way, never too little; :func:`forget_dead` looks at all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import torch

from ebbflow.torch_seams.storages import StorageWatch, has_memory

__all__ = ["forget_all", "forget_dead", "leave", "left_bytes", "watches_of"]

LOOKED_AT = 32  # of what is left, the longest not looked at, per question

_lock = threading.Lock()
_watches: dict[int, StorageWatch] = {}  # looked at longest ago comes first
_total_bytes = 0


def watches_of(tensors: Iterable[torch.Tensor]) -> list[StorageWatch]:
    """Watches of those that take the CPU's memory."""
    return [StorageWatch(each) for each in tensors if has_memory(each)]


def leave(watches: Iterable[StorageWatch]) -> None:
    """``watches`` are of what lives on: a step that has ended returned it, or a call without gradients."""
    global _total_bytes
    alive = [each for each in watches if each.alive]
    with _lock:
        for each in alive:
            if each.key not in _watches:
                _watches[each.key] = each
                _total_bytes += each.bytes


def left_bytes(*counted: Mapping[int, int]) -> int:
    """Bytes of what is left, without the storages whose keys are in ``counted``."""
    if not _watches:
        return 0
    with _lock:
        _look(LOOKED_AT)
        shared = {key for each in counted for key in _watches.keys() & each.keys()}
        return _total_bytes - sum(_watches[key].bytes for key in shared)


def forget_dead() -> None:
    """Look at all that is left."""
    with _lock:
        _look(len(_watches))


def forget_all() -> None:
    """Count nothing of what lives now: for tests, each of which begins as a process does."""
    global _total_bytes
    with _lock:
        _watches.clear()
        _total_bytes = 0


def _look(count: int) -> None:
    global _total_bytes
    for key in [key for key, _ in zip(_watches, range(count), strict=False)]:
        watch = _watches.pop(key)
        if watch.alive:
            _watches[key] = watch
        else:
            _total_bytes -= watch.bytes
