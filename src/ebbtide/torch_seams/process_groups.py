"""A process group of ``torch.distributed``: who is in it, how long it waits, and its store.

The store is what the processes have found each other by. Beside a collective, which ends when all have come to it or
at the group's timeout, it can be asked something at any moment by one process alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "GroupStore",
    "StoreGone",
    "all_processes",
    "comes_from_a_collective",
    "is_open",
    "ranks_in",
    "timeout_seconds",
]

_ANSWER = timedelta(seconds=5)
_DEFAULT_SECONDS = 1800.0
_OF_COLLECTIVES = (
    "gloo",
    "NCCL",
    "nccl",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Application timeout",
    "Broken pipe",
)


def _c10d() -> Any:
    """Torch's module of process groups, which a torch that was built without them has not."""
    from torch.distributed import distributed_c10d

    return distributed_c10d


class StoreGone(Exception):
    """The store does not answer: the process that holds it has ended, or the group is destroyed."""


@contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, KeyError) as error:  # of networks, stores, and groups that are destroyed
        raise StoreGone(str(error)) from error


class GroupStore:
    """A connection of our own to the store of ``group``, with keys that nobody else has.

    Nobody's waiting holds it up, where the store can be connected to once more, and it waits for nothing itself: what
    is not there is ``None``. Everything raises :class:`StoreGone` if the store cannot be reached.

    A store may outlive its group and serve another: what was laid there before is not found by the next connection
    that the same ``rank`` makes.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        with _reached():
            c10d = _c10d()
            store: Any = c10d._get_process_group_store(group)
            with suppress(RuntimeError, NotImplementedError):
                store = store.clone()
                store.set_timeout(_ANSWER)
            store = c10d.PrefixStore("ebbtide", store)
            self._store: Any = c10d.PrefixStore(str(store.add(f"connection/{rank}", 1)), store)

    def write(self, key: str, text: str) -> None:
        """Lay ``text`` under ``key``."""
        with _reached():
            self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """What lies under ``key``."""
        with _reached():
            return self._store.get(key).decode() if self._store.check([key]) else None

    def read_all(self, keys: Sequence[str]) -> list[str | None]:
        """What lies under each of ``keys``."""
        with _reached():
            if self._store.check(list(keys)):
                return [each.decode() for each in self._store.multi_get(list(keys))]
        return [self.read(each) for each in keys]

    def has(self, key: str) -> bool:
        """Whether something lies under ``key``."""
        with _reached():
            return self._store.check([key])

    def add(self, key: str, amount: int) -> int:
        """The number under ``key``, 0 before anybody has added to it, with ``amount`` more."""
        with _reached():
            return self._store.add(key, amount)


def all_processes() -> dist.ProcessGroup | None:
    """The group of all processes that train together; ``None`` where there are none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def ranks_in(group: dist.ProcessGroup) -> tuple[int, tuple[int, ...]]:
    """The place of this process in ``group``, and the ranks of all in it as the world counts them."""
    return dist.get_rank(group), tuple(dist.get_process_group_ranks(group))


def is_open(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` has not been destroyed."""
    return group in _c10d()._world.pg_map


def timeout_seconds(group: dist.ProcessGroup, device: torch.device) -> float:
    """How long a collective of ``group`` on ``device`` waits for the others."""
    backend: Any = group._get_backend(device)
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout.total_seconds() if isinstance(timeout, timedelta) else _DEFAULT_SECONDS


def comes_from_a_collective(error: BaseException) -> bool:
    """Whether ``error`` is what a collective raises whose others have not come, or have ended."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(each in str(error) for each in _OF_COLLECTIVES)
