"""What lives beside model and arguments and is known all the same, on CPU, where the allocator keeps no total.

1. *What fitted models have returned*: ``out = model(x); out["loss"].backward()`` in a loop keeps ``out`` alive through
   the next forward; so do logged losses, hidden states and outputs of a validation that somebody collects. Constants
   that captures hold count with them.
2. *What data loaders have given* (``batches``): a label that only a loss outside reads, the batches that a trainer
   fetches before it accumulates, the one that accelerate fetches ahead.
3. *What planned backwards have handed out* (``engine.executor``): gradients of arguments, which the loop reads for its
   next call (adversarial training), and those that ``torch.autograd.grad`` was asked for. Arguments that take one count
   with them.

They are resident for every later step of any fitted model, each storage once. Nothing is kept alive here.

Every call asks, and thousands of losses may be collected: so each question looks again at a few of each kind only, and
takes the others as alive. Too much may be counted that way, never too little; :func:`forget_dead` looks at all. Most
gradients go at once, all of a model's together, so of these more are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ebbtide.deferred_queue import DeferredQueue
from ebbtide.torch_seams.storages import StorageWatch, has_memory

__all__ = ["forget_all", "forget_dead", "give", "hand_out", "is_left", "leave", "left_bytes", "watches_of"]

LOOKED_AT = 32  # of what is left, the longest not looked at, per question
_GRADIENTS_LOOKED_AT = 1024

_turns = DeferredQueue()


class _Left:
    """Watches of one kind, of which each question looks at so many."""

    def __init__(self, looked_at: int = LOOKED_AT) -> None:
        self.looked_at = looked_at
        self.watches: dict[int, StorageWatch] = {}  # looked at longest ago comes first
        self.total_bytes = 0

    def add(self, watch: StorageWatch) -> None:
        self.watches[watch.key] = watch
        self.total_bytes += watch.bytes

    def look(self, count: int) -> None:
        """Forget the dead among the first ``count``."""
        for key in [key for key, _ in zip(self.watches, range(count), strict=False)]:
            watch = self.watches.pop(key)
            if watch.alive:
                self.watches[key] = watch
            else:
                self.total_bytes -= watch.bytes

    def bytes_without(self, counted: Iterable[Mapping[int, int]]) -> int:
        shared = {key for each in counted for key in self.watches.keys() & each.keys()}
        return self.total_bytes - sum(self.watches[key].bytes for key in shared)


_returned, _given, _handed_out = _Left(), _Left(), _Left(_GRADIENTS_LOOKED_AT)
_KINDS = (_returned, _given, _handed_out)


def watches_of(tensors: Iterable[torch.Tensor]) -> list[StorageWatch]:
    """Watches of those that take the CPU's memory."""
    return [StorageWatch(each) for each in tensors if has_memory(each)]


def leave(watches: Iterable[StorageWatch]) -> None:
    """``watches`` are of what may live on: a step that has ended returned it, or a call without gradients."""
    _add(watches, _returned)


def give(watches: Iterable[StorageWatch]) -> None:
    """``watches`` are of what a data loader gives."""
    _add(watches, _given)


def hand_out(watches: Iterable[StorageWatch]) -> None:
    """``watches`` are of gradients that a planned backward gives, and that go to no parameter."""
    _add(watches, _handed_out)


def is_left(key: int) -> bool:
    """Whether the living storage of that key counts as left."""
    return any(key in kind.watches for kind in _KINDS)


def left_bytes(*counted: Mapping[int, int]) -> int:
    """Bytes of what is left, without the storages whose keys are in ``counted``."""

    def looked_at() -> int:
        for kind in _KINDS:
            kind.look(kind.looked_at)
        return sum(kind.bytes_without(counted) for kind in _KINDS if kind.watches)

    return _turns.now(looked_at)


def forget_dead() -> None:
    """Look at all that is left."""

    def look() -> None:
        for kind in _KINDS:
            kind.look(len(kind.watches))

    _turns.now(look)


def forget_all() -> None:
    """Count nothing of what lives now: for tests, each of which begins as a process does."""

    def forget() -> None:
        for kind in _KINDS:
            kind.watches.clear()
            kind.total_bytes = 0

    _turns.now(forget)


def _add(watches: Iterable[StorageWatch], kind: _Left) -> None:
    """Called by the garbage collector as well, when it comes upon a step that ended."""
    alive = [each for each in watches if each.alive]

    def add() -> None:
        for each in alive:
            if not is_left(each.key):
                kind.add(each)

    if alive:
        _turns.do(add)
