"""PyTorch's own profiler as a recorder of the CPU allocator's events (``torch.autograd.profiler``, Kineto)."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import _enable_record_function, _profiler_enabled
from torch.autograd import profiler

from ebbtide.torch_seams.patches import Attribute, Item, Patch, patched, wrapped

__all__ = [
    "AllocationProfile",
    "ProfilerActive",
    "before_other_profiles",
    "profiler_active",
    "runs_on_another_thread",
]

_QUIET = "6"  # above every level of Kineto's messages
_WARNING, _ERROR = 1, 2  # levels of torch's C++ log (c10/util/logging_is_not_google_glog.h)
_C10 = {"win32": "c10.dll", "darwin": "libc10.dylib"}.get(sys.platform, "libc10.so")


@dataclass(frozen=True, eq=False)
class _Level:
    """A place of patches: the level from which torch's C++ log is written."""

    owner: ctypes.c_int
    name: str = "FLAGS_caffe2_log_level"

    @property
    def key(self) -> tuple[object, ...]:
        """Its address."""
        return (ctypes.addressof(self.owner),)

    def read(self) -> int:
        """The level."""
        return self.owner.value

    def write(self, value: int) -> None:
        """Set the level."""
        self.owner.value = value


@functools.cache
def _level() -> _Level | None:
    """Torch's own variable, which its library exports for its other libraries; ``None`` where it does not."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _C10))
        return _Level(ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level"))
    except (OSError, ValueError):
        return None


class ProfilerActive(RuntimeError):
    """A profiler runs already, and a process has one."""


_switching = threading.RLock()
"""Held while a profile starts or stops. Between torch's own look whether one runs and its start another thread may
start one, and two at once end the process (a segmentation fault in ``_disable_profiler``)."""
_running: dict[int, int] = {}  # threads by id of open profiles of ours


def _forked() -> None:
    """In a child: whoever held the lock is not there."""
    global _switching
    _switching = threading.RLock()


os.register_at_fork(after_in_child=_forked)


def runs_on_another_thread() -> bool:
    """Whether the profiler that runs is one of ours, which another thread stops before long."""
    return any(thread != threading.get_ident() for thread in list(_running.values()))


def profiler_active() -> bool:
    """Whether a profiler runs in this process, whoever started it; a second one must not be started."""
    return profiler._is_profiler_enabled


def before_other_profiles(called: Callable[[], None]) -> Patch:
    """A patch, not open yet: while it is, ``called`` runs whenever a profile is about to begin, whoever's it is."""

    def make(below: Callable[..., None]) -> Callable[..., None]:
        def prepared(profile: profiler.profile) -> None:
            called()
            below(profile)

        return prepared

    return wrapped(Attribute(profiler.profile, "_prepare_trace"), make)


class AllocationProfile:
    """One run of the profiler, from :meth:`start` to :meth:`stop`.

    1. Kineto writes a line to standard error at every start and stop below its level of messages, which it reads from
       the environment once, at the process's first start; so the level is there for that moment, unless the user has
       set one.
    2. Torch's CPU allocator warns of the first block, and of every thousandth, that it takes back while a profiler runs
       and has handed out before (``ProfiledCPUMemoryReporter::Delete`` in ``c10/core/CPUAllocator.cpp``). Such blocks
       are expected here. So warnings of the C++ log, not of Python, are left out while this profile runs, unless the
       user has set a level of theirs (``TORCH_CPP_LOG_LEVEL``). Errors are written as ever.
    3. Calls of ops are not recorded, only memory. A call that begins on this thread may end on another, as a collective
       of ``DistributedDataParallel`` does that its hooks begin in a backward; if the profiler has stopped by then, its
       end is written to memory that is gone.
    """

    def __init__(self) -> None:
        self._profile = profiler.profile(use_cpu=True, profile_memory=True, use_kineto=True)
        self._open = False
        self._hush: Patch | None = None

    def start(self) -> None:
        """Begin recording, on this thread.

        Raises:
            ProfilerActive: if a profiler runs, on any thread.
        """
        with _switching:
            if profiler_active():
                raise ProfilerActive("a profiler is active; allocations cannot be recorded at the same time")
            self._start()
            _running[id(self)] = threading.get_ident()

    def _start(self) -> None:
        level = os.environ.get("KINETO_LOG_LEVEL", _QUIET)
        with patched(Item(os.environ, "KINETO_LOG_LEVEL"), level):
            self._open = True  # before it is: an interrupt may come between
            if (level := _level()) is not None and level.read() == _WARNING:
                self._hush = patched(level, _ERROR).open()
            try:
                self._profile.__enter__()
                _enable_record_function(False)
            except Exception:
                self._open = False
                self._speak()
                raise

    def stop(self) -> None:
        """End recording; does nothing if nothing is recorded."""
        with _switching:
            self._stop()
            _running.pop(id(self), None)

    def _stop(self) -> None:
        if self._open:
            _enable_record_function(True)
            try:
                self._profile.__exit__(None, None, None)
            except RuntimeError:  # of 2.11, where nothing runs: an interrupt came before the start or after the end
                if _profiler_enabled():
                    raise
                profiler._run_on_profiler_stop()
            self._speak()
            self._open = False  # after it is: what an interrupt has cut off is done again

    def _speak(self) -> None:
        """Write warnings again."""
        if self._hush is not None:
            self._hush.close()

    def calls(self) -> list[Any]:
        """After :meth:`stop`: Kineto's events of ops, of which there are none (definition 3)."""
        results = self._profile.kineto_results
        assert results is not None
        return [event for event in results.experimental_event_tree() if event.tag.name == "TorchOp"]

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
