"""Ctrl-C wherever it comes: nothing that was captured is lost, and no forward stays in flight whose graph is gone."""

from __future__ import annotations

import copy
import gc
import signal
import sys
import weakref
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.capture import trace
from ebbtide.engine import pending_steps
from ebbtide.engine.captured_steps import CapturedSteps
from ebbtide.engine.compiled import Capture
from ebbtide.engine.fitted_class import FITTED
from ebbtide.torch_seams.code_guards import _Watched  # pyright: ignore[reportPrivateUsage]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return ebbtide.fit(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)), "4MiB", progress=None)


def test_no_captured_step_is_lost(model: nn.Module) -> None:
    model(torch.randn(4, 8)).sum().backward()
    fitted = FITTED[model].steps
    steps = fitted._steps  # pyright: ignore[reportPrivateUsage]
    ((key, (step,)),) = steps.items()
    now: Any = SimpleNamespace(key=key)
    for line in range(20):
        left = line

        def interrupt(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code is not CapturedSteps.keep.__code__:
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

    before = pending_steps.kept_bytes()
    loss = model(torch.randn(4, 8)).sum()
    assert pending_steps.kept_bytes() > before
    home = FITTED[model].pending
    assert pending_steps.pending_around(home)
    with monkeypatch.context() as patched:
        patched.setattr(pending_steps.PendingStep, "abandon", interrupted)
        del loss
        gc.collect()
    assert pending_steps.pending_around(home) == []
    assert pending_steps.kept_bytes() == before
    assert not home


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("share", [0.03, 0.1, 0.25, 0.45, 0.65, 0.85])
def test_an_interrupt_while_torch_traces_comes_once_it_has_traced(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle it would end the process, be swallowed, or leave torch tracing otherwise from then on."""

    class Interrupts:
        """A profiler, told of every call, which interrupts the ``last``."""

        def __init__(self, last: float) -> None:
            self.calls, self.last = 0, last

        def __call__(self, _frame: FrameType, event: str, _arg: Any) -> None:
            self.calls += event == "call"
            if event == "call" and self.calls == self.last:
                signal.raise_signal(signal.SIGALRM)

    def captured(interrupts: Interrupts) -> nn.Module:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
        fitted = ebbtide.fit(model, "4MiB", progress=None)
        before = sys.getprofile()
        sys.setprofile(interrupts)
        try:
            fitted(torch.randn(4, 8))
        finally:
            sys.setprofile(before)
        return fitted

    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        captured(Interrupts(0.0))  # what only a first one imports
        counted, until_traced = Interrupts(0.0), list[int]()
        partition = Capture.partition

        def partitioned(*given: Any, **named: Any) -> Any:
            until_traced.append(counted.calls)
            return partition(*given, **named)

        with monkeypatch.context() as patched:
            patched.setattr(Capture, "partition", partitioned)
            captured(counted)
        interrupts = Interrupts(round(share * until_traced[0]))
        with pytest.raises(KeyboardInterrupt) as raised:
            captured(interrupts)
        assert Path(raised.traceback[-1].path).name == "signals.py", "it waited"
        assert interrupts.calls >= interrupts.last
        model = captured(Interrupts(0.0))
        model(torch.randn(4, 8)).sum().backward()
    finally:
        signal.signal(signal.SIGALRM, handler)


def test_an_interrupt_while_a_call_looks_at_its_guards_comes_before_its_forward(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch swallows what guards raise, and asks for no tensor that is away then."""
    enabled: list[bool] = []
    looked = _Watched.are_as_they_were

    def interrupting(self: _Watched) -> bool:
        signal.raise_signal(signal.SIGALRM)
        enabled.append(torch._C._is_torch_function_enabled())
        return looked(self)

    def handler(*_: object) -> None:
        enabled.append(torch._C._is_torch_function_enabled())
        raise TimeoutError

    x = torch.randn(4, 8)
    model(x).sum().backward()
    gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(_Watched, "are_as_they_were", interrupting)
            with pytest.raises(TimeoutError):
                model(x)
            assert enabled == [False, True], "in the guards, which it interrupted, and in the handler"
            assert not _lives_on(model), "what it raised would keep the batch, for which later steps have no room"
    finally:
        signal.signal(signal.SIGALRM, before)
    assert pending_steps.pending_around(FITTED[model].pending) == []
    model.zero_grad()
    model(x).sum().backward()
    assert ebbtide.calls_of(model).planned == 2
    for each, first in zip(model.parameters(), gradients, strict=True):
        assert each.grad is not None
        assert torch.equal(each.grad, first)


def _lives_on(model: nn.Module) -> bool:
    """Whether the batch of an interrupted call is kept by a cycle."""
    x = torch.randn(4, 8)
    batch = weakref.ref(x)
    gc.disable()
    try:
        model(x)
    except TimeoutError:
        del x
    finally:
        gc.enable()
    return batch() is not None


def test_what_was_captured_while_a_signal_waited_needs_no_second_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[Capture] = []
    partition = Capture.partition

    def interrupted(self: Capture, *given: Any) -> Any:
        captures.append(self)
        signal.raise_signal(signal.SIGALRM)
        return partition(self, *given)

    monkeypatch.setattr(Capture, "partition", interrupted)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    fitted = ebbtide.fit(model, "1MiB", progress=None, options=ebbtide.Options(effort=10))
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            fitted(x)
    finally:
        signal.signal(signal.SIGALRM, handler)
    for _ in range(2):
        for each in (fitted, plain):
            each(x).sum().backward()
    assert len(captures) == 1
    assert ebbtide.calls_of(fitted).planned == 2
    for ours, theirs in zip(fitted.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_an_interrupt_while_the_compiler_is_imported_comes_once_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a package that is imported by halves (networkx) the next import fails, in every later call."""

    class Partition:
        pass

    partitioner: Any = Partition()
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    monkeypatch.setattr(trace, "require_supported_torch", lambda: signal.raise_signal(signal.SIGALRM))
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            trace.compile_step(partitioner)
        assert Path(raised.traceback[-1].path).name == "signals.py", "it waited"
    finally:
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("failing", ["raises", "selects", "shape"])
def test_a_batch_whose_capture_failed_is_let_go_before_the_next_step(failing: str, collects: bool) -> None:
    """Whatever the collector does by itself: later steps peak where they did before."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.kind = torch.nn.Linear(64, 64), torch.nn.Linear(64, 8), ""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.kind == "raises":
                raise ValueError("of the user's")
            if self.kind == "selects":
                x = x[x[:, 0] > 0]
            return self.second(torch.relu(self.first(x))).square().mean()

    model = ebbtide.fit(Model(), "2MiB", options=ebbtide.Options(effort=20))
    for _ in range(3):
        model(torch.randn(256, 64)).backward()
    if not collects:
        gc.disable()
    try:
        x = torch.randn(256, 64 if failing != "shape" else 32)
        batch = weakref.ref(x)
        model.kind = failing
        with pytest.raises((ValueError, RuntimeError)):
            model(x)
        del x
        model.kind = ""
        model(torch.randn(256, 64)).backward()
        assert batch() is None
    finally:
        gc.enable()
