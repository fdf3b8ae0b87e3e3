"""The flag by which Dynamo tells the whole process that it compiles, and optimizers of other threads that ask it.

While a thread compiles (``torch.compiler.is_compiling``), ``torch.optim`` computes with tensors what it computes with
Python's numbers otherwise, to other bits, and in every thread. So captures and steps of optimizers wait for each other:
1. What steps an optimizer from inside of a step, or tries one out, has the lock for the while, and so has a capture.
2. Steps in a loop have hooks at both ends, and the second is not called where a step raises. So they hold nothing: a
   step is noted when it begins, after captures that run, and a capture waits as long as its frame is on its thread's
   stack, but not for ever: the step may wait for what the capture's thread does next.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from ebbtide.torch_seams.optimizers import frame_of_step

__all__ = ["optimizer_has_stepped", "optimizer_steps", "while_nobody_steps", "while_nothing_is_captured"]

_POLL_SECONDS = 1e-3
_PATIENCE_SECONDS = 10.0
_capturing = threading.RLock()
_stepping: dict[int, int] = {}  # by thread, the id of the frame in which an optimizer steps


def _forked() -> None:
    """In a child: whoever held the lock is not there."""
    global _capturing
    _capturing = threading.RLock()
    _stepping.clear()


os.register_at_fork(after_in_child=_forked)


def while_nothing_is_captured() -> AbstractContextManager[object]:
    """While open, no other thread captures a step (definition 1)."""
    return _capturing


@contextmanager
def while_nobody_steps() -> Iterator[None]:
    """While open, a step is captured, and no other thread steps an optimizer (definitions 1 and 2)."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        with _capturing:
            if time.monotonic() >= end or not any(map(_steps_still, list(_stepping.items()))):
                yield
                return
        time.sleep(_POLL_SECONDS)


def optimizer_steps() -> None:
    """An optimizer is about to step, as its hook on this thread knows (definition 2)."""
    frame = frame_of_step()
    with _capturing:
        if frame is not None:
            _stepping[threading.get_ident()] = id(frame)


def optimizer_has_stepped() -> None:
    """The step of :func:`optimizer_steps` has ended."""
    _stepping.pop(threading.get_ident(), None)


def _steps_still(step: tuple[int, int]) -> bool:
    thread, begun_in = step
    if thread == threading.get_ident():
        return False
    frame = sys._current_frames().get(thread)
    while frame is not None and id(frame) != begun_in:
        frame = frame.f_back
    return frame is not None
