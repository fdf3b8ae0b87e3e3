"""What still lives of what fitted models have returned, on CPU, where the allocator keeps no total.

``out = model(x); out["loss"].backward()`` in a loop keeps ``out`` alive through the next forward; so do logged losses
and hidden states that somebody collects. They are resident for every later step of any fitted model. Nothing is kept
alive here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ebbflow.torch_seams.storages import StorageWatch

__all__ = ["leave", "living"]

_lock = threading.Lock()
_watches: dict[int, StorageWatch] = {}


def leave(watches: Iterable[StorageWatch]) -> None:
    """A step has ended; ``watches`` are of what its forward returned."""
    alive = [each for each in watches if each.alive]
    if alive:
        with _lock:
            _watches.update((each.key, each) for each in alive)


def living() -> dict[int, int]:
    """Bytes of what lives still, by key of the storage."""
    if not _watches:
        return {}
    with _lock:
        for key in [key for key, each in _watches.items() if not each.alive]:
            del _watches[key]
        return {key: each.bytes for key, each in _watches.items()}
