"""A first call that takes long says so: one line of the log, a bar on a terminal, nothing where that is asked for."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ebbflow
from ebbflow.errors import BudgetError
from ebbflow.planners import Progress, narration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narration, "AFTER_SECONDS", 0.02)
    monkeypatch.setattr(narration, "TICK_SECONDS", 0.01)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))


def plan(**options: object) -> None:
    ebbflow.plan(model(), (torch.randn(4, 8),), budget="1MiB", effort=10, **options)  # type: ignore[arg-type]


def fit(**options: object) -> None:
    # Nothing is measured: what a busy machine makes of that is another matter.
    fitted = ebbflow.fit(model(), "1MiB", effort=10, verify=False, **options)  # type: ignore[arg-type]
    for _ in range(3):
        fitted(torch.randn(4, 8)).sum().backward()


def refused(**options: object) -> None:
    fitted = ebbflow.fit(model(), "1KiB", effort=10, **options)  # type: ignore[arg-type]
    with pytest.raises(BudgetError):
        fitted(torch.randn(4, 8))


CALLS = pytest.mark.parametrize("call", [plan, fit, refused])


@CALLS
def test_one_line_of_the_log(call: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    call()
    records = [each for each in caplog.records if each.name == "ebbflow"]
    assert 1 <= len(records) <= 2  # a loss outside the model is planned for twice
    assert records[0].levelno == logging.WARNING
    assert "captur" in records[0].getMessage()
    assert "progress=None" in records[0].getMessage()


@CALLS
def test_a_bar_on_a_terminal_that_goes(
    call: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    call()
    shown = terminal.getvalue().split(narration._CLEAR)
    assert len(set(shown)) > 3, "it moves"
    assert shown[-1] == "", "nothing is left"
    assert all("\n" not in each for each in shown)
    assert not caplog.records


@CALLS
@pytest.mark.parametrize("progress", [None, list[Progress]().append], ids=["None", "a function"])
def test_nothing_else_is_said(
    call: Callable[..., None], progress: object, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    call(progress=progress)
    assert not [each for each in caplog.records if each.name.startswith("ebbflow")]
    assert narration._CLEAR not in terminal.getvalue()


def test_a_quick_call_says_nothing_and_no_thread_is_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narration, "AFTER_SECONDS", 60.0)
    begin = time.monotonic()
    fit()
    plan()
    refused()
    assert time.monotonic() - begin < 55.0, "nobody waits for it"
    assert not caplog.records
    assert not [each for each in threading.enumerate() if each.name == "ebbflow-progress"]


def test_a_closed_standard_error_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    terminal.close()
    plan()
    monkeypatch.setattr("sys.stderr", None)
    plan()
