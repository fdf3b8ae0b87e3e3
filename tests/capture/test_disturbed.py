"""A capture beside another thread that exports: it waits, and what fails all the same says why."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.capture import disturbed
from ebbtide.capture.branches import on_eagers_branches
from ebbtide.capture.disturbed import undisturbed
from ebbtide.errors import CaptureError
from ebbtide.faults import RAISED_IN_CAPTURE, own_faults
from ebbtide.torch_seams import compile_mode
from ebbtide.torch_seams.eager_answers import Answers


class Exporting:
    """A thread that is inside of an export, as far as its stack tells, until it is told to go on."""

    def __init__(self) -> None:
        self.inside, self.over = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.inside.set()
        assert self.over.wait(60)


@contextmanager
def somebody_exporting() -> Iterator[Exporting]:
    exporting = Exporting()
    names: dict[str, Any] = {}
    exec(compile("def export(exporting): exporting.wait()", compile_mode._EXPORT, "exec"), names)
    thread = threading.Thread(target=names["export"], args=(exporting,))
    thread.start()
    try:
        assert exporting.inside.wait(60)
        yield exporting
    finally:
        exporting.over.set()
        thread.join()


def test_a_capture_waits_for_another_threads_export() -> None:
    model = ebbtide.fit(
        nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1)),
        "1MiB",
        progress=None,
        options=ebbtide.Options(effort=10),
    )
    with somebody_exporting() as export:
        threading.Timer(0.5, export.over.set).start()
        begin = time.monotonic()
        model(torch.randn(8, 4)).sum().backward()
        assert export.over.is_set()
    assert time.monotonic() - begin >= 0.4
    assert ebbtide.calls_of(model).planned == 1


def test_a_failure_beside_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturbed, "_PATIENCE_SECONDS", 0.05)

    def fail() -> None:
        raise AssertionError("of torch's")

    with somebody_exporting():
        with pytest.raises(CaptureError, match=r"(?s)once before.*another thread.*Error: of torch's") as raised:
            undisturbed(fail)
        assert isinstance(raised.value.__cause__, AssertionError)
        assert undisturbed(lambda: 1) == 1
    with pytest.raises(AssertionError, match="of torch's"):
        undisturbed(fail)


def test_a_fault_that_the_export_made_is_not_called_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturbed, "_PATIENCE_SECONDS", 0.0)

    def attempt() -> None:
        with own_faults():
            raise AssertionError("CURRENT_PATCHER is None")

    with somebody_exporting(), pytest.raises(CaptureError, match="AssertionError: CURRENT_PATCHER") as caught:
        undisturbed(attempt)
    assert "report" not in str(caught.value)


def test_an_exception_of_the_models_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturbed, "_PATIENCE_SECONDS", 0.05)

    def fail() -> None:
        error = ZeroDivisionError()
        error.add_note(f"{RAISED_IN_CAPTURE}: line 1")
        raise error

    with somebody_exporting(), pytest.raises(ZeroDivisionError):
        undisturbed(fail)


def test_a_real_export_is_seen() -> None:
    seen: list[bool] = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(compile_mode.traces(sys._getframe()))
            return x + 1

    torch.export.export(Looks(), (torch.ones(2),), strict=False)
    torch.fx.symbolic_trace(Looks())
    assert seen == [True, True]
    Looks()(torch.ones(2))
    assert seen.pop() is False


@pytest.fixture
def timed_out() -> Iterator[Callable[[], None]]:
    """Sends a signal whose handler raises."""

    def handle(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, handle)
    yield lambda: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_a_timeout_stays_beside_an_export(timed_out: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturbed, "_PATIENCE_SECONDS", 0.05)
    with somebody_exporting(), pytest.raises(TimeoutError):
        undisturbed(timed_out)


def test_a_timeout_ends_a_later_try(timed_out: Callable[[], None]) -> None:
    answers = Answers()
    tries: list[int] = []

    def attempt() -> None:
        tries.append(1)
        answers.at((("file", 1),))
        if len(tries) > 1:
            timed_out()
        raise CaptureError("a break")

    with pytest.raises(TimeoutError):
        on_eagers_branches(attempt, answers)
    assert len(tries) == 2
