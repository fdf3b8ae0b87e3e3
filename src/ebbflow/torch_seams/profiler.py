"""PyTorch's own profiler as a recorder of the CPU allocator's events (``torch.autograd.profiler``, Kineto)."""

from __future__ import annotations

import os
from typing import Any

from torch.autograd import profiler

from ebbflow.torch_seams.patches import Item, patched

__all__ = ["AllocationProfile", "profiler_active"]

_QUIET = "6"  # above every level of Kineto's messages


def profiler_active() -> bool:
    """Whether a profiler runs in this process, whoever started it; a second one must not be started."""
    return profiler._is_profiler_enabled


class AllocationProfile:
    """One run of the profiler, from :meth:`start` to :meth:`stop`.

    Kineto writes a line to standard error at every start and stop below its level of messages, which it reads from the
    environment once, at the process's first start; so the level is there for that moment, unless the user has set one.
    """

    def __init__(self) -> None:
        self._profile = profiler.profile(use_cpu=True, profile_memory=True, use_kineto=True)
        self._open = False

    def start(self) -> None:
        """Begin recording, on this thread."""
        level = os.environ.get("KINETO_LOG_LEVEL", _QUIET)
        with patched(Item(os.environ, "KINETO_LOG_LEVEL"), level):
            self._open = True  # before it is: an interrupt may come between
            try:
                self._profile.__enter__()
            except Exception:
                self._open = False
                raise

    def stop(self) -> None:
        """End recording; does nothing if nothing is recorded."""
        if self._open:
            self._profile.__exit__(None, None, None)
            self._open = False  # after it is: what an interrupt has cut off is done again

    def events(self) -> list[tuple[int, int, int]]:
        """After :meth:`stop`: time in ns, address and bytes of every block taken, or given back if negative, by time.

        ``experimental_event_tree`` is Kineto's own tree of events; those tagged ``Allocation`` have the pointer and the
        size in ``extra_fields``.
        """
        results = self._profile.kineto_results
        assert results is not None
        found: list[tuple[int, int, int]] = []
        stack: list[Any] = list(results.experimental_event_tree())
        while stack:
            event = stack.pop()
            if event.tag.name == "Allocation":
                found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
            stack.extend(event.children)
        found.sort(key=lambda row: row[0])
        return found
