"""A lane: a thread that copies, one job after the other, and keeps nothing that it has copied.

1. The worker only copies. Tensors are allocated and dropped by the thread that computes, where the allocator's events
   are seen; so a job lets go of what it copies before it says that it is done.
2. A job that fails keeps the text of what happened. A stored exception would keep its frames, and these the step.
3. A lane without work for a while has no thread. A process that was forked from has none either; it starts its own.
   Where none can be started, and when the interpreter ends, whoever submits a job does it: nothing is waited for that
   nobody would do.
4. Ctrl-C may come while somebody waits. ``threading.Event`` may then be left locked, which would stop the lane, so a
   job says that it has ended by a queue, which is C code.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable

from ebbtide.transfers.traffic import Traffic

__all__ = ["Job", "Lane"]

_IDLE_SECONDS = 5.0


class Job:
    """One copy.

    Attributes:
        done: whether it has ended.
        failure: what went wrong, in words; empty if nothing did.
        seconds: that it took, on the lane's own clock; 0 until it is done.
    """

    __slots__ = ("_ended", "_then", "_work", "done", "failure", "seconds")

    def __init__(self, work: Callable[[], object], then: Callable[[], None]) -> None:
        self._work: Callable[[], object] | None = work
        self._then = then
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.done = False
        self.failure = ""
        self.seconds = 0.0

    def cancel(self) -> None:
        """Do nothing if it has not begun."""
        self._work = None

    def wait(self) -> None:
        """Return once it has ended."""
        while not self.done:
            self._ended.get()
            self._ended.put(None)  # for whoever waits besides

    def join(self, traffic: Traffic) -> None:
        """Wait for it, and count its seconds and those of the wait."""
        begin = time.perf_counter()
        self.wait()
        traffic.waited_seconds += time.perf_counter() - begin
        traffic.transfer_seconds += self.seconds
        self.seconds = 0.0  # counted

    def run(self) -> None:
        """Do it; called by its lane's thread."""
        work, self._work = self._work, None
        begin = time.perf_counter()
        try:
            if work is not None:
                work()
        except BaseException as error:
            self.failure = _in_words(error)
        del work
        self.seconds = time.perf_counter() - begin
        try:
            self._then()
        except Exception as error:  # whoever waits is let go, and the lane goes on
            self.failure = self.failure or _in_words(error)
        finally:
            self.done = True
            self._ended.put(None)


def _in_words(error: BaseException) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


class Lane:
    """Runs jobs in the order in which they were submitted.

    Args:
        name: of its thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._start_anew()
        _lanes.add(self)

    def _start_anew(self) -> None:
        self._lock = threading.RLock()  # a signal handler may submit a job while this thread does
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], object], then: Callable[[], None] = lambda: None) -> Job:
        """Queue a copy; ``then`` is called in the end, also of one that failed or was cancelled."""
        job = Job(work, then)
        with self._lock:
            if sys.is_finalizing() or (self._thread is None and not self._start()):
                job.run()  # nobody else's is waiting
            else:
                self._jobs.put(job)
        return job

    def _start(self) -> bool:
        """Start the thread, if the system gives one. The lock is held."""
        thread = threading.Thread(target=self._serve, name=f"ebbtide {self._name}", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            return False
        self._thread = thread
        return True

    def _serve(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return  # who started it was interrupted, and another one serves
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._thread = None
                        return
                continue
            job.run()
            del job  # not kept until the next one comes


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


def _forked() -> None:
    for lane in _lanes:
        lane._start_anew()  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_forked)
