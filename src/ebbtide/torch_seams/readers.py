"""Whether another thread is in the middle of reading a tensor: its memory must not go then.

Reads that begin later are refused (``offloaded``); one that has begun is in C++, where nobody can tell it anything.

1. A thread that runs an op of torch on a tensor holds a reference to it, on the interpreter's stack if nowhere else. So
   a tensor to which nothing refers but one container is read by nobody.
2. Where there are more references, they may be anything. They do no harm while no other thread runs that may have
   one. A thread that waits for work, as those of pools and progress bars do, is known by the function of the standard
   library that it waits in. One of which only installed packages are on the stack that have no torch, such as a
   notebook's or a test runner's that waits for its channel, has no tensor.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

__all__ = ["is_read_elsewhere"]

_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_WAITS = frozenset(
    [
        *(("threading", name) for name in ("wait", "_wait_for_tstate_lock", "_handle_results")),
        *(("queue", "get"), ("selectors", "select"), ("thread", "_worker"), ("socket", "accept")),
        *(("connection", name) for name in ("wait", "_recv", "_poll")),
    ]
)
"""Module and function of the standard library."""


def is_read_elsewhere(tensors: list[torch.Tensor], index: int) -> bool:
    """Whether another thread may be reading ``tensors[index]``.

    Args:
        tensors: where nobody else but its one container has a reference to it.
        index: of the tensor.
    """
    if tensors[index].device.type != "cpu":  # an allocator gives memory in the order of the stream
        return False
    return _references(tensors, index) > _OF_ONE_CONTAINER and _others_run()


def _references(tensors: list[torch.Tensor], index: int) -> int:
    return sys.getrefcount(tensors[index])


def _generation() -> int:
    container = {0: torch.empty(1)}
    return _references([container[0]], 0)


_OF_ONE_CONTAINER = _generation()


def _others_run() -> bool:
    """Whether a Python thread runs besides this one and the lanes (definition 2)."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)  # a frame that holds itself would stay, and what its callers hold
    lanes = {each.ident for each in threading.enumerate() if each.name.startswith("ebbtide ")}
    return any(_may_read(frame) for thread, frame in frames.items() if thread not in lanes)


def _may_read(frame: FrameType) -> bool:
    """Whether the thread that is in a frame may have a tensor (definition 2)."""
    code = frame.f_code
    if (Path(code.co_filename).stem, code.co_name) in _WAITS:
        return False
    if not code.co_filename.startswith(_INSTALLED) and code.co_filename.startswith(_STANDARD):
        return True  # it may have been handed any function, such as a tensor's
    each: FrameType | None = frame
    while each is not None:
        if not each.f_code.co_filename.startswith((*_INSTALLED, _STANDARD)) or _has_torch(each.f_globals):
            return True
        each = each.f_back
    return False


def _has_torch(names: dict[str, Any]) -> bool:
    """Whether a module is torch's, or has torch or something of it under a name."""
    values = list(names.values())  # the thread goes on meanwhile
    modules = [names.get("__name__"), *(each.__name__ for each in values if isinstance(each, ModuleType))]
    modules += [each.__module__ for each in values if isinstance(each, type)]
    return any(isinstance(name, str) and name.partition(".")[0] == "torch" for name in modules)
