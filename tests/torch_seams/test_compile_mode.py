"""What happens on a thread while a compiled function of ours runs, or while another thread compiles."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import ebbtide
from ebbtide.capture import disturbed
from ebbtide.torch_seams import compile_mode, dynamo


class Finalized:
    """Has a finalizer in Python, whose frame a compiler is shown as any other."""

    ran = 0

    def __del__(self) -> None:
        Finalized.ran += 1


@pytest.mark.parametrize("compiling", [False, True])
def test_a_finalizer_is_not_ours_to_compile_or_refuse(monkeypatch: pytest.MonkeyPatch, compiling: bool) -> None:
    """Reference counts or the garbage collector may call one while frames are shown to what compiles."""
    from torch._dynamo import eval_frame

    ours, graphs, said = compile_mode.OwnCompileMode(), [], []
    found, begin = list[Finalized](), eval_frame._maybe_set_eval_frame

    def then_finalize(callback: Any) -> Any:
        before = begin(callback)
        if callback is not None:
            found.clear()
        return before

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x * 2, backend=backend, fullgraph=True, dynamic=False)
    x = torch.ones(2)
    if not compiling:
        ours.compiling(compiled, x)
    # A frame that was skipped once is not shown again, so each case has code of its own.
    monkeypatch.setattr(Finalized.__del__, "__code__", Finalized.__del__.__code__.replace(co_name=str(compiling)))
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: said.append(unraisable.exc_value))
    monkeypatch.setattr(eval_frame, "_maybe_set_eval_frame", then_finalize)
    before = Finalized.ran
    found.append(Finalized())
    assert (ours.compiling if compiling else ours.only_compiled)(compiled, x).tolist() == [2.0, 2.0]
    assert Finalized.ran == before + 1
    assert not said
    assert len(graphs) == 1
    dynamo.forget_compiled(compiled)


def test_compiled_functions_inside_of_a_call_are_somebody_elses() -> None:
    """What a step calls may be compiled, and compile anew, while the step itself may not."""
    ours = compile_mode.OwnCompileMode()
    inner = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        return lambda x: (inner(torch.ones(int(x.sum()))) if inside else x * 2,)

    inside = False
    compiled = torch.compile(lambda x: x * 2, backend=backend, fullgraph=True, dynamic=False)
    assert ours.compiling(compiled, torch.ones(2)).tolist() == [2.0, 2.0]
    inside = True
    assert ours.only_compiled(compiled, torch.ones(2)).tolist() == [2.0, 2.0]
    assert ours.only_compiled(compiled, torch.full((2,), 2.0)).tolist() == [2.0] * 4
    with pytest.raises(compile_mode.NotCompiled):
        ours.only_compiled(compiled, torch.ones(3))
    dynamo.forget_compiled(compiled)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean()


@contextmanager
def _somebody(trace: Callable[[Callable[[torch.Tensor], torch.Tensor]], object]) -> Iterator[None]:
    """While open, another thread is in the middle of a trace."""
    begun, end, failed = threading.Event(), threading.Event(), []

    def traced(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        end.wait(60)
        return x.sin()

    def run() -> None:
        try:
            trace(traced)
        except BaseException as error:  # what a thread raises is lost
            failed.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        end.set()
        thread.join()
        assert not failed


def _jit(traced: Callable[[torch.Tensor], torch.Tensor]) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)  # the same, from 2.14 on
        return torch.jit.trace(traced, torch.ones(2))


def _compile(traced: Callable[[torch.Tensor], torch.Tensor]) -> object:
    from torch._dynamo.backends.common import aot_autograd

    def stop(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        traced(torch.ones(1))
        return graph

    return torch.compile(lambda x: x.cos(), backend=aot_autograd(fw_compiler=stop))(torch.ones(2))


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(lambda traced: make_fx(traced)(torch.ones(2)), id="make_fx"),
        pytest.param(_jit, id="jit"),
        pytest.param(_compile, id="compile"),
    ],
)
def test_a_step_is_captured_and_planned_while_another_thread_traces(
    trace: Callable[[Callable[[torch.Tensor], torch.Tensor]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch says of the whole process is not said of this thread."""
    monkeypatch.setattr(disturbed, "_PATIENCE_SECONDS", 0.1)  # this trace ends when the captures have
    model = ebbtide.fit(Net(), "100%", options=ebbtide.Options(effort=10))
    x = torch.randn(4, 8)
    if trace is _compile:  # two threads do not compile at once: the capture would wait for the other's end
        model(x).backward()
    planned = ebbtide.calls_of(model).planned
    with _somebody(trace):
        for _ in range(3):
            model(x).backward()
        with torch.no_grad():
            model(x)
        assert ebbtide.calls_of(model).planned == planned + 3
        assert sum(ebbtide.calls_of(model).unplanned.values()) == 1


def test_a_model_may_be_traced_where_it_is_fitted() -> None:
    model = ebbtide.fit(Net(), "100%", options=ebbtide.Options(effort=10))
    x = torch.randn(4, 8)
    graph = make_fx(model)(x)
    assert torch.equal(graph(x), model(x))
    assert ebbtide.calls_of(model).planned == 1
