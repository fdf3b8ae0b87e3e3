"""Canaries of ``compile_mode`` and ``frames``: what may be compiled, and where traces end."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.torch_seams import compile_mode, dynamo, fake_tensors, frames
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def a_threads_calls_have_their_own_stance() -> None:
    """A call may find what is compiled and compile nothing, or heed no stance of the process."""
    ours, ran = compile_mode.OwnCompileMode(), []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        ran.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x * 2, backend=backend, fullgraph=True, dynamic=False)
    with torch.compiler.set_stance("force_eager"):
        ours.compiling(compiled, torch.ones(2))
    expect(len(ran) == 1, "a stance of the process is heeded")
    expect(ours.only_compiled(compiled, torch.ones(2)).tolist() == [2.0, 2.0], "what is compiled is not found")
    try:
        ours.only_compiled(compiled, torch.ones(3))
    except compile_mode.NotCompiled:
        pass
    else:
        raise RuntimeError("a call compiles that may not")
    expect("size" in ours.why_not_compiled(compiled, torch.ones(3)), "a guard that fails is not told")
    expect(len(ran) == 1 and compiled(torch.ones(3)).tolist() == [2.0] * 3, "others cannot compile any more")
    dynamo.forget_compiled(compiled)


@canary
def traces_end_where_they_are_told_to() -> None:
    """A function that is left out runs as it is inside of what is compiled; a constant is asked while it is traced."""
    traced: list[bool] = []

    @compile_mode.constant_in_traces
    def asked() -> bool:
        return compile_mode.tracing_here()

    def left(x: torch.Tensor) -> torch.Tensor:
        traced.append(compile_mode.tracing_here())
        return x + 1

    out = compile_mode.left_out_of_traces(left, "it is left out")

    def function(x: torch.Tensor) -> torch.Tensor:
        return out(x * 2) if asked() else x

    compiled = torch.compile(function, backend="eager")
    expect(compiled(torch.ones(2)).tolist() == [3.0, 3.0], "a constant is not asked inside of the trace")
    expect(traced == [False] and not asked(), f"a function that is left out was traced: {traced}")
    dynamo.forget_compiled(compiled)


@canary
def dispatch_modes_are_seen() -> None:
    """Under a mode that compiles nothing a call is refused before any of it runs; modes of torch's own are none."""
    ran: list[int] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def function(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x * 2

    ours = compile_mode.OwnCompileMode()
    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=False)
    try:
        with Watching():
            ours.compiling(compiled, torch.ones(2))
    except RuntimeError as error:
        expect(compile_mode.NO_FRAMES in str(error) and not ran, f"a mode is told as {error!r}, after {len(ran)} runs")
    else:
        raise RuntimeError("a call is compiled under a dispatch mode")
    with fake_tensors.FakeTensorMode():
        expect(not compile_mode.any_torch_dispatch_mode_on_stack(), "a mode of torch's own counts as somebody's")
    dynamo.forget_compiled(compiled)


@canary
def exports_are_told_by_their_stacks() -> None:
    """An export that is not strict, and a trace of ``torch.fx``, run the model below functions that are looked for."""
    seen: list[bool] = []

    class Looking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(compile_mode.traces(sys._getframe()))
            return x + 1

    torch.fx.symbolic_trace(Looking())
    Looking()(torch.ones(2))
    expect(seen == [True, False], f"traces are told as {seen}")
    torch.export.export(Looking(), (torch.ones(2),), strict=False)
    expect(all(seen[2:]) and len(seen) > 2, f"exports are told as {seen[2:]}")


@canary
def frames_of_a_model_are_its_own() -> None:
    """What others have compiled of a frame does not count for its limit, and stays when a model goes."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def ebbtide_step_calls(x: torch.Tensor) -> torch.Tensor:
        return function(x)

    def made() -> tuple[Any, frames.Frames, list[frames.Frame]]:
        seen: list[frames.Frame] = []

        def settings(frame: frames.Frame) -> Any:
            seen.append(frame)
            return contextlib.nullcontext()

        def backend(graph: torch.fx.GraphModule, _: object) -> object:
            return graph.forward

        ours = compile_mode.OwnCompileMode()
        own = frames.Frames(settings, lambda error, frame: frames.Then.RAISE)
        compiled = torch.compile(ebbtide_step_calls, backend=backend)
        ours.in_pieces(compiled, torch.ones(2), frames=own)
        return backend, own, seen

    (first, of_first, _), (_, of_second, seen) = made(), made()
    expect(ebbtide_step_calls.__code__ in of_first.codes, "a frame that is compiled is not shown")
    expect(seen[0].others == 1, f"{seen[0].others} graphs are others'")
    dynamo.forget_frames_of(first, of_first.codes)
    kept = [each for each in _debug_get_cache_entry_list(ebbtide_step_calls.__code__) if each.backend is not None]
    expect(len(kept) == 1 and ebbtide_step_calls.__code__ in of_second.codes, f"{len(kept)} graphs are left")
    dynamo.forget_compiled(torch.compile(ebbtide_step_calls, backend="eager"))
