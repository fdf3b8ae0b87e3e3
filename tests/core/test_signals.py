"""Signals that wait: what a handler raises comes at the end of what must not be interrupted, and nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from ebbflow.signals import signals_wait

NUMBER = signal.SIGUSR1
OTHER = signal.SIGUSR2


class Comes(Exception):
    pass


def raising(number: int, _: FrameType | None) -> None:
    raise Comes(number)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    numbers = (NUMBER, OTHER, signal.SIGINT)
    before = [signal.signal(each, raising) for each in numbers]
    yield
    after = [signal.signal(each, old) for each, old in zip(numbers, before, strict=True)]
    assert after == [raising] * len(numbers)


def sent(*numbers: int) -> int:
    """How many of these signals were sent before a handler raised."""
    count = 0
    with pytest.raises(Comes):  # noqa: PT012
        with signals_wait():
            for number in numbers:
                signal.raise_signal(number)
                count += 1
    return count


def test_what_a_handler_raises_waits() -> None:
    assert sent(NUMBER) == 1
    assert sent(NUMBER, OTHER) == 2


def test_a_second_of_a_kind_comes_at_once() -> None:
    assert sent(NUMBER, OTHER, NUMBER) == 2


def test_an_error_of_the_block_is_the_context() -> None:
    def fail() -> None:
        with signals_wait():
            signal.raise_signal(NUMBER)
            raise ValueError

    with pytest.raises(Comes) as raised:
        fail()
    assert isinstance(raised.value.__context__, ValueError)


def test_handlers_that_raise_nothing_have_run_at_the_end() -> None:
    came: list[int] = []
    signal.signal(NUMBER, lambda number, _: came.append(number))
    signal.signal(OTHER, lambda number, _: came.append(number))
    with signals_wait():
        signal.raise_signal(NUMBER)
        with signals_wait():
            signal.raise_signal(OTHER)
        assert came == []
    assert sorted(came) == sorted([NUMBER, OTHER])
    signal.signal(NUMBER, raising)
    signal.signal(OTHER, raising)


def test_one_that_raises_takes_no_other_along() -> None:
    """All handlers are theirs again, or hand on what comes."""
    sent(NUMBER, OTHER)
    for number in (NUMBER, OTHER):
        with pytest.raises(Comes):
            signal.raise_signal(number)


def test_a_handler_laid_meanwhile_stays() -> None:
    def other(number: int, _: FrameType | None) -> None:
        raise ArithmeticError(number)

    with signals_wait():
        signal.signal(NUMBER, other)
    assert signal.signal(NUMBER, raising) is other


def test_what_is_ignored_or_ends_the_process_stays_so() -> None:
    signal.signal(NUMBER, signal.SIG_IGN)
    signal.signal(OTHER, signal.SIG_DFL)
    with signals_wait():
        signal.raise_signal(NUMBER)
        assert signal.getsignal(NUMBER) is signal.SIG_IGN
        assert signal.getsignal(OTHER) is signal.SIG_DFL
    signal.signal(NUMBER, raising)
    signal.signal(OTHER, raising)


def test_another_thread_holds_nothing_up() -> None:
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with signals_wait():
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10)
    try:
        with pytest.raises(Comes):
            signal.raise_signal(NUMBER)
    finally:
        done.set()
        thread.join()


def test_ctrl_c_is_told_that_it_waits(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Comes), signals_wait():
        os.kill(os.getpid(), signal.SIGINT)
    assert "interrupt again to stop at once" in capfd.readouterr().err
