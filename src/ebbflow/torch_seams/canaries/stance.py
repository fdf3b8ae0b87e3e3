"""The canaries of ``stance``: that calls of compiled functions are ours to permit, and that traces end where told."""

from __future__ import annotations

import torch

from ebbflow.torch_seams import dynamo, stance
from ebbflow.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def a_threads_calls_have_their_own_stance() -> None:
    """A call may find what is compiled and compile nothing, or heed no stance of the process."""
    ours, ran = stance.OwnStance(), []

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
    except stance.NotCompiled:
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

    @stance.constant_in_traces
    def asked() -> bool:
        return stance.tracing_here()

    def left(x: torch.Tensor) -> torch.Tensor:
        traced.append(stance.tracing_here())
        return x + 1

    out = stance.left_out_of_traces(left, "it is left out")

    def function(x: torch.Tensor) -> torch.Tensor:
        return out(x * 2) if asked() else x

    compiled = torch.compile(function, backend="eager")
    expect(compiled(torch.ones(2)).tolist() == [3.0, 3.0], "a constant is not asked inside of the trace")
    expect(traced == [False] and not asked(), f"a function that is left out was traced: {traced}")
    dynamo.forget_compiled(compiled)
