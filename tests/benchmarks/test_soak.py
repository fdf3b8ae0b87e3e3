"""What may happen while a model trains, in small (in full: ``benchmarks/soak.py``)."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import EbbtideError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from questions import soak


@pytest.fixture(autouse=True)
def _quiet() -> None:
    torch.manual_seed(0)


def test_an_exception_in_any_place_of_any_kind_of_step() -> None:
    places = ["forward op", "backward op", "forward hook", "forward pre-hook", "gradient hook", "loss", "optimizer"]
    model = ebbtide.fit(soak._Custom(), soak.BUDGET, progress=None, options=ebbtide.Options(effort=50))
    for seed, place in enumerate(places):
        if place == "optimizer":  # again from a first step, and one that is to be measured
            ebbtide.set_budget(model, soak.BUDGET)
        soak._Fails.where = place
        assert soak._step_with_hooks(model, seed), place
        assert soak._Fails.where == "", place
        assert soak.next_step_is_right_of(soak._Custom(), model), place


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python's callbacks swallow interrupts
@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.8])
def test_an_interrupt_in_a_first_call(share: float) -> None:
    seconds = 0.5
    model = soak.fitted()
    # Not by a signal to ourselves: SIGINT is ignored in what a shell starts in the background.
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, share * seconds)
        # A callback may swallow an interrupt, and torch may fail for want of what it was to do.
        with contextlib.suppress(KeyboardInterrupt, EbbtideError):
            for _ in range(200):
                model(torch.randn(256, soak.WIDTH)).backward()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert soak.next_step_is_right(model)


def test_models_in_a_row_are_let_go() -> None:
    gone: list[weakref.ref[nn.Module]] = []
    for seed in range(3):
        model = soak.made(seed)
        optimizer = torch.optim.AdamW(model.parameters())
        ebbtide.fit(model, soak.BUDGET, progress=None, optimizer=optimizer, options=ebbtide.Options(effort=50))
        assert soak.next_step_is_right(model)
        optimizer.step()
        gone.append(weakref.ref(model))
        del model, optimizer
    gc.collect()
    assert [each() for each in gone] == [None] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is there on Unix alone")
def test_a_child_of_fork_and_its_parent() -> None:
    model = soak.fitted()
    assert soak.next_step_is_right(model)
    child = os.fork()
    if child == 0:
        os._exit(0 if soak.next_step_is_right(model) and soak.next_step_is_right(model, 80) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert soak.next_step_is_right(model, 96)
