"""Signals that wait: what a handler raises comes at the end of what must not be interrupted, and nothing is lost."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide import signals
from ebbtide.engine.fitted_class import fitted_class
from ebbtide.optimizer.cost.step_bytes import step_bytes
from ebbtide.planners.search import jit
from ebbtide.signals import signals_wait

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


def test_a_second_that_asks_to_end_comes_at_once() -> None:
    assert sent(NUMBER, signal.SIGINT, NUMBER, signal.SIGINT) == 3


def test_a_second_of_another_kind_waits() -> None:
    """Two workers die: the second error in the middle would end the process."""
    assert sent(NUMBER, OTHER, NUMBER) == 3


def test_in_a_block_inside_of_another_a_second_comes_at_once_and_is_told_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(Comes), signals_wait(), signals_wait():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Comes):
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err.count("press it again") == 1


def test_all_that_came_are_handled_though_the_first_raises() -> None:
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    signal.signal(OTHER, note)
    assert sent(OTHER, signal.SIGINT, NUMBER) == 3
    assert came == [OTHER]
    signal.signal(NUMBER, note)
    signal.signal(signal.SIGINT, raising)
    assert sent(NUMBER, OTHER, signal.SIGINT) == 3
    assert came == [OTHER, NUMBER, OTHER]
    signal.signal(NUMBER, raising)
    signal.signal(OTHER, raising)


def test_what_comes_while_handlers_are_put_back_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    lay = signals._lay  # pyright: ignore[reportPrivateUsage]

    def interrupted(number: int, handler: Any) -> None:
        lay(number, handler)
        if handler is raising:
            signal.raise_signal(number)

    monkeypatch.setattr(signals, "_lay", interrupted)
    with pytest.raises(Comes), signals_wait():
        pass
    for number in (NUMBER, OTHER, signal.SIGINT):
        assert signal.getsignal(number) is raising


@pytest.mark.skipif(not hasattr(faulthandler, "register"), reason="POSIX")
def test_the_handler_that_another_library_has_put_over_pythons_stays() -> None:
    with tempfile.TemporaryFile("w+") as file:
        inside = 0

        def dumped() -> int:
            """Bytes of a dump since the last call."""
            file.seek(0)
            text = file.read()
            file.seek(0)
            file.truncate()
            return len(text)

        faulthandler.register(NUMBER, file=file, chain=True)
        try:
            with pytest.raises(Comes), signals_wait():  # noqa: PT012
                signal.raise_signal(NUMBER)
                inside = dumped()
            with pytest.raises(Comes):
                signal.raise_signal(NUMBER)
            assert inside
            assert dumped()
        finally:
            faulthandler.unregister(NUMBER)


@pytest.mark.skipif(not hasattr(signal, "siginterrupt"), reason="POSIX")
@pytest.mark.parametrize("interrupts", [False, True])
def test_system_calls_go_on_after_a_signal_as_before(interrupts: bool) -> None:
    """As asyncio has it for its handlers."""
    signal.signal(NUMBER, lambda *_: None)
    signal.siginterrupt(NUMBER, interrupts)
    reading, writing = os.pipe()
    main = threading.get_ident()

    def disturb() -> None:
        time.sleep(0.05)
        signal.pthread_kill(main, NUMBER)
        time.sleep(0.05)
        os.write(writing, b"x")

    def read() -> int:
        thread = threading.Thread(target=disturb)
        thread.start()
        count = ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1)
        thread.join()
        if count < 0:
            os.read(reading, 1)
        return count

    expected = -1 if interrupts else 1
    try:
        assert read() == expected
        with signals_wait():
            assert read() == expected
        assert read() == expected
    finally:
        os.close(reading)
        os.close(writing)
        signal.signal(NUMBER, raising)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_is_forked_meanwhile_waits_for_nothing() -> None:
    with signals_wait():
        child = os.fork()
        if not child:
            try:
                signal.raise_signal(NUMBER)
            except Comes:
                os._exit(7)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


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
    assert "Ctrl-C is handled when that is done (press it again to have it handled at once)" in capfd.readouterr().err


class _Fails:
    """A cache of numba's that a signal interrupts."""

    def load_overload(self, *_: object) -> None:
        signal.raise_signal(NUMBER)

    save_overload = load_overload


class _Interrupting(type):
    """Of a class that a signal interrupts while another is derived from it."""

    def mro(cls) -> list[type]:
        if cls.__bases__[0] is not nn.Module:
            signal.raise_signal(NUMBER)
        return super().mro()


class _Model(nn.Module, metaclass=_Interrupting):
    pass


class _Optimizer(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a second one does not wait


@pytest.mark.parametrize(
    "call",
    [
        lambda: jit._Cache(_Fails()).load_overload(),
        lambda: jit._Cache(_Fails()).save_overload(),
        lambda: fitted_class(_Model),
        lambda: step_bytes(_Optimizer([nn.Parameter(torch.ones(2))], lr=0.1)),
    ],
    ids=["a cache is read", "a cache is written", "a class is derived", "an optimizer's step is foreseen"],
)
def test_what_a_handler_raises_comes_out_where_other_errors_say_something_else(call: Callable[[], object]) -> None:
    with pytest.raises(Comes):
        call()
