"""The canary of ``compiler_faults``: a failed assertion of Dynamo's own is told with the lines that were traced."""

from __future__ import annotations

import functools

import torch

from ebbtide.torch_seams import compiler_faults, dynamo
from ebbtide.torch_seams.canaries.registry import canary, expect
from ebbtide.torch_seams.patches import Item, patched

__all__: list[str] = []


@canary
def assertions_of_dynamos_are_told_with_lines() -> None:
    """What a handler of Dynamo's asserts comes out as it is, with the tracer of each function in its frames."""
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + torch.compiler.is_dynamo_compiling()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    step = torch.compile(outer, backend="eager", fullgraph=True, dynamic=False)
    place = Item(TorchInGraphFunctionVariable._get_handlers(), torch.compiler.is_dynamo_compiling)
    told = None
    with patched(place, functools.partial(torch._assert, False, "made up")):
        try:
            step(torch.ones(2))
        except Exception as error:
            told = error if "from user code" in str(error) else compiler_faults.told_with_its_lines(error)
    dynamo.forget_compiled(step)
    text = str(told)
    expect("from user code:" in text, f"it is told as {text}")
    expect("in outer" in text, f"{text} does not name the outer function")
    expect("in inner" in text, f"{text} does not name the inner one")
