"""Garbage that holds memory: what a capture leaves behind lies in cycles, which only the collector ends.

A capture that fails, by the user's own exception as well, leaves the call's arguments in cycles of Dynamo's. The caller
handles the exception and goes on, and what eager would have freed by then would lie beside every later step. So the
next planned call collects first, once the exception is not handled any more.
"""

from __future__ import annotations

import gc
import sys

from ebbtide.signals import signals_wait

__all__ = ["collect_after_failed_captures", "collect_garbage", "note_failed_capture"]

_failed: list[None] = []


def collect_garbage() -> None:
    """Free what only cycles hold. Signals wait: the callbacks of what dies would swallow what a handler raises."""
    with signals_wait():
        gc.collect()


def note_failed_capture() -> None:
    """A capture has failed, in any model."""
    _failed.append(None)


def collect_after_failed_captures() -> None:
    """Collect if a capture has failed since, unless its exception may be handled still."""
    if _failed and sys.exception() is None:
        _failed.clear()
        collect_garbage()
