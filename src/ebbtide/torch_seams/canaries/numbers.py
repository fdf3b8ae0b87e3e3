"""The canaries of ``numbers``: integers are taken as symbols where they are asked for, and as nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ebbtide.torch_seams import dynamo, numbers
from ebbtide.torch_seams.canaries.aot import settings
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


class _Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = 3

    def forward(self, x: Tensor) -> tuple[Tensor, int, float]:
        self.step += 1
        return (x + 1 if self.step % 5 == 0 else x + 2), self.step * 2, float(self.step)


class _Symbols:
    def __init__(self) -> None:
        self.taken: dict[str, object] = {}

    def is_symbol(self, name: str, value: int) -> bool:
        return name == "L['module'].step"

    def took(self, name: str, symbol: object) -> None:
        self.taken[name] = symbol


@canary
def numbers_are_symbols_with_guards() -> None:
    """One capture serves all values for which the code goes the same way; a copy of its graph runs without numbers."""
    module, decides = _Counts(), _Symbols()
    graphs: list[list[bool]] = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append([numbers.is_number(node) for node in graph.graph.nodes])
        apart = {n for n in graph.graph.nodes if numbers.symbols_in(n) & set(decides.taken.values())}
        apart |= {node for node in graph.graph.nodes if node.target is torch.scalar_tensor}
        rest = numbers.without_nodes(graph, apart)
        expect(not any(map(numbers.is_number, rest.graph.nodes)), "a number is left in a graph")
        expect(all(hasattr(n, "_dynamo_source") for n in rest.graph.find_nodes(op="placeholder")), "no sources")
        return graph.forward

    def step(module: Any, x: Tensor) -> Any:
        return module(x)

    with settings(), numbers.numbers_taken(decides):
        compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
        for value in (3, 0, 1, 4, 9):  # two of which lead to a multiple of 5
            module.step = value
            found = compiled(module, torch.zeros(2))
            expected = 1.0 if (value + 1) % 5 == 0 else 2.0
            expect(bool(found[0].eq(expected).all()), f"another branch at {value}")
            expect(found[1:] == (2 * value + 2, float(value + 1)), f"other numbers at {value}")
            expect((type(found[2]), module.step) == (float, value + 1), "numbers of another type")
    expect(list(decides.taken) == ["L['module'].step"], f"names are {list(decides.taken)}")
    expect(len(graphs) == 2, f"{len(graphs)} captures for two branches")
    dynamo.forget_compiled(compiled)
