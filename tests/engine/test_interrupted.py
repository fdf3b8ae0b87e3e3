"""Ctrl-C wherever it comes: nothing that was captured is lost, and no forward stays in flight whose graph is gone."""

from __future__ import annotations

import gc
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ebbflow
from ebbflow.engine import flights
from ebbflow.engine.fitted_class import FITTED
from ebbflow.engine.model import FittedModel


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return ebbflow.fit(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)), "4MiB", progress=None)


def test_no_captured_step_is_lost(model: nn.Module) -> None:
    model(torch.randn(4, 8)).sum().backward()
    fitted = FITTED[model]
    steps = fitted._steps  # pyright: ignore[reportPrivateUsage]
    ((key, (step,)),) = steps.items()
    now: Any = SimpleNamespace(key=key)
    for line in range(20):
        left = line

        def interrupt(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code is not FittedModel.keep.__code__:
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            fitted.keep(step, now)
        except KeyboardInterrupt:
            pass
        else:
            assert line >= 4
            break
        finally:
            sys.settrace(before)
        assert steps == {key: [step]}
    else:
        raise AssertionError("it never came to its end")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_finalizer_that_is_interrupted_leaves_no_forward_in_flight(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = flights.kept_bytes()
    loss = model(torch.randn(4, 8)).sum()
    assert flights.kept_bytes() > before
    home = FITTED[model].flights
    assert flights.aloft(home)
    with monkeypatch.context() as patched:
        patched.setattr(flights.Flight, "give_up", interrupted)
        del loss
        gc.collect()
    assert flights.aloft(home) == []
    assert flights.kept_bytes() == before
    assert not home
