"""Numbers that change from call to call and steer a step, or are counted and told, without being computed with.

``if self.global_step % 100 == 0`` asks a number one question; a capture that takes it as a constant serves one value.
1. A number is known by *where it is from* (``torch_seams.numbers``). One that was another in an earlier capture of the
   model is *changing*, and the next capture takes it as a symbol: it serves all values for which the code goes the same
   way, which torch guards.
2. Of Dynamo's graph, what computes numbers from changing numbers is taken *apart*, by Python's own operators. It runs
   at every call beside the step, on the numbers of this call; the step itself has no number in it.
3. A number that tensors are computed from is part of the step: it is *fixed*, a constant as before, and so is every
   number of a capture that fails with symbols and goes well with constants.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import fx

from ebbtide.errors import CaptureError
from ebbtide.signals import raised_by_a_handler
from ebbtide.torch_seams.numbers import is_number, numbers_taken, symbols_in, without_nodes

__all__ = ["Beside", "Numbers", "numbers_apart"]

_Result = TypeVar("_Result")
_Compiled = Callable[..., Any]
_TOLD: Any = torch.scalar_tensor
"""Of float64, as which Dynamo hands a fraction out of its graph."""
_COMPUTING = frozenset([*(value for value in vars(operator).values() if callable(value)), torch.sym_float, _TOLD])


class _Taken(threading.local):
    """What the capture of this thread has taken as symbols, by name."""

    def __init__(self) -> None:
        self.symbols: dict[str, Any] = {}


class Numbers:
    """The numbers of one model's captures."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._changing: set[str] = set()
        self._fixed: set[str] = set()
        self._taken = _Taken()

    def is_symbol(self, name: str, value: int) -> bool:
        """Whether a number becomes a symbol (definitions 1 and 3)."""
        if name in self._fixed:
            return False
        if self._seen.setdefault(name, value) != value:
            self._changing.add(name)
        return name in self._changing

    def took(self, name: str, symbol: object) -> None:
        """The capture of this thread has it as a symbol."""
        self._taken.symbols[name] = symbol

    @property
    def symbols(self) -> set[Any]:
        """Those of the capture of this thread."""
        return set(self._taken.symbols.values())

    def noticed(self) -> AbstractContextManager[None]:
        """While open, captures of this thread take numbers as definitions 1 and 3 say."""
        self._taken.symbols = {}
        return numbers_taken(self)

    def fixed_if_needed(self, attempt: Callable[[], _Result]) -> _Result:
        """What ``attempt``, a capture, returns or raises, tried with constants where it fails with symbols."""
        try:
            return attempt()
        except Exception as error:
            taken = set(self._taken.symbols)
            if not taken or raised_by_a_handler(error):
                raise
        before = self._fixed
        self._fixed = before | taken
        try:
            return attempt()
        except Exception:
            self._fixed = before  # it fails anyway
            raise


class Beside:
    """What runs beside a graph that has had its numbers taken out (definition 2).

    Args:
        graph: without its numbers.
        numbers: from the numbers among the inputs to those among the outputs.
        inputs: positions of the numbers among the inputs.
        outputs: positions of the numbers among the outputs.
    """

    def __init__(
        self, graph: fx.GraphModule, numbers: fx.GraphModule, inputs: Sequence[int], outputs: Sequence[int]
    ) -> None:
        self.graph = graph
        self._numbers, self._inputs, self._outputs = numbers, tuple(inputs), tuple(outputs)

    def without_numbers(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs of the graph."""
        return [each for position, each in enumerate(inputs) if position not in self._inputs]

    def around(self, compiled: _Compiled) -> _Compiled:
        """``compiled``, the graph, with the numbers among its inputs and outputs."""

        def run(*inputs: Any) -> list[Any]:
            outputs = list(compiled(*self.without_numbers(inputs)))
            found = self._numbers(*(inputs[position] for position in self._inputs))
            for position, number in zip(self._outputs, found, strict=True):
                outputs.insert(position, number)
            return outputs

        return run


def numbers_apart(module: fx.GraphModule, numbers: Numbers) -> Beside | None:
    """Dynamo's graph without the changing numbers, and those; ``None`` if there is none in it.

    Raises:
        CaptureError: if something else is computed from one (definition 3).
    """
    symbols = numbers.symbols
    graph = module.graph
    apart = [node for node in graph.nodes if is_number(node) and symbols_in(node) & symbols]
    if not apart:
        return None
    apart += [node for each in apart for node in each.users if node.target is _TOLD]
    numbers_of = set(apart)
    inputs = [i for i, node in enumerate(graph.find_nodes(op="placeholder")) if node in numbers_of]
    (output,) = graph.find_nodes(op="output")
    _refuse_use(graph, apart, output, symbols)
    returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    outputs = [i for i, each in enumerate(returned) if each in numbers_of]
    alone = _alone(apart, [returned[i] for i in outputs])
    return Beside(without_nodes(module, numbers_of), alone, inputs, outputs)


def _refuse_use(graph: fx.Graph, apart: Sequence[fx.Node], output: fx.Node, symbols: set[Any]) -> None:
    numbers = set(apart)
    for node in graph.nodes:
        used = numbers.intersection(node.all_input_nodes)
        if node in numbers:
            plain = node.op == "placeholder" or (node.op == "call_function" and node.target in _COMPUTING)
            if plain and used == set(node.all_input_nodes):
                continue
        elif node is output:
            continue  # it is told, or put back where it is from
        elif not used and not symbols_in(node) & symbols:
            continue
        raise CaptureError("something is computed from a number that changes between calls")


def _alone(apart: Sequence[fx.Node], returned: Sequence[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in apart:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[each] for each in returned))
    return fx.GraphModule({}, graph)
