"""Who takes the updates of the backward that runs on this thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

__all__ = ["Updater", "current_updater", "using_updater"]


class Updater(Protocol):
    """What takes the updates of one step."""

    def partial_norm(self, position: int, gradient: torch.Tensor) -> torch.Tensor:
        """Find out what is to be known of ``gradient``, of the primal at ``position``, and give it as one number."""
        ...

    def total_norm(self, norms: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """All partial norms are there, by position: give what each gradient is scaled by."""
        ...

    def update(self, position: int, gradient: torch.Tensor) -> None:
        """Apply ``gradient`` to the primal at ``position``, or drop it."""
        ...


class _Current(threading.local):
    updater: Updater | None = None


_current = _Current()


@contextmanager
def using_updater(updater: Updater | None) -> Iterator[None]:
    """While open, updates that this thread runs are taken by ``updater``."""
    before, _current.updater = _current.updater, updater
    try:
        yield
    finally:
        _current.updater = before


def current_updater() -> Updater:
    """The one that is open."""
    updater = _current.updater
    assert updater is not None, "an update runs outside of a step"
    return updater
