"""Pieces of work, some of which finalizers bring: one at a time, none in the middle of another, none lost."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import pytest

from at_once import at_once
from ebbtide.deferred_queue import DeferredQueue


class _Object:
    pass


def _ends(work: Callable[[], object]) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=60)
    return not thread.is_alive()


@pytest.mark.parametrize("begin", ["now", "do"])
def test_what_a_finalizer_brings_is_done_after_what_it_interrupts(begin: str) -> None:
    queue, done = DeferredQueue(), list[str]()
    garbage = [_Object()]
    weakref.finalize(garbage[0], queue.do, lambda: done.append("brought"))

    def work() -> None:
        done.append("begun")
        garbage.clear()
        done.append("ended")

    assert _ends(lambda: getattr(queue, begin)(work))
    assert done == ["begun", "ended", "brought"]


def test_what_an_interrupt_ends_is_done_when_its_thread_comes_next() -> None:
    queue, done = DeferredQueue(), list[str]()
    errors = [KeyboardInterrupt()]

    def piece() -> None:
        if errors:
            raise errors.pop()
        done.append("piece")

    with pytest.raises(KeyboardInterrupt):
        queue.do(piece)
    assert queue.now(lambda: list(done)) == ["piece"]


def test_what_work_raises_lets_others_in() -> None:
    queue, done = DeferredQueue(), list[str]()

    def fail() -> None:
        queue.do(lambda: done.append("brought"))
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        queue.now(fail)
    assert _ends(lambda: queue.do(lambda: done.append("next")))
    assert done == ["brought", "next"]


def test_threads_take_turns() -> None:
    queue, amid, most, done = DeferredQueue(), [0], [0], [0]

    def piece() -> None:
        amid[0] += 1
        most[0] = max(most[0], amid[0])
        done[0] += 1
        amid[0] -= 1

    def work() -> None:
        for _ in range(2_000):
            queue.do(piece)
            queue.now(piece)

    at_once(4, work)
    assert (most[0], done[0]) == (1, 16_000)


def test_each_piece_is_done_by_the_thread_that_brings_it() -> None:
    queue, wrong = DeferredQueue(), list[int]()

    def work() -> None:
        here = threading.get_ident()

        def piece() -> None:
            if threading.get_ident() != here:
                wrong.append(here)

        for _ in range(3_000):
            queue.do(piece)

    at_once(4, work)
    assert not wrong
