"""Numbers that a trace of Dynamo finds, each by the name of where it is from, taken as constants or as symbols."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import fx

from ebbtide.torch_seams.graphs import expression_of
from ebbtide.torch_seams.patches import Item, wrapped

__all__ = ["Decides", "is_number", "numbers_taken", "symbols_in", "without_nodes"]


class Decides(Protocol):
    """What says how an integer is taken."""

    def is_symbol(self, name: str, value: int) -> bool:
        """Whether the integer of this name is to be a symbol."""
        ...

    def took(self, name: str, symbol: object) -> None:
        """It is one."""
        ...


@contextmanager
def numbers_taken(decides: Decides) -> Iterator[None]:
    """While open, captures of this thread ask ``decides`` for every integer that is neither a size nor a constant.

    A name is the one of Dynamo's source, such as ``L['module'].step``. One that is taken as a symbol is an input of
    the graph if the graph computes with it, and what the code asked of it are guards. Dynamo has a table of what takes
    values of a type (``VariableBuilder._type_dispatch``); its own entry treats those that way that the setting
    ``dynamic_sources`` names.
    """
    from torch._dynamo.variables.builder import VariableBuilder

    def make(below: Callable[..., Any]) -> Callable[..., Any]:
        return lambda builder, value: _taken(decides, below, builder, value)

    with wrapped(Item(VariableBuilder._type_dispatch(), int), make, this_thread=True):
        yield


def _taken(decides: Decides, below: Callable[..., Any], builder: Any, value: object) -> Any:
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    if type(value) is not int or not decides.is_symbol(builder.source.name, value):
        return below(builder, value)
    variable = builder.wrap_symint(value, dynamism=DimDynamic.DYNAMIC)
    decides.took(builder.source.name, expression_of(variable.sym_num))
    return variable


def is_number(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph is a number."""
    return isinstance(node.meta.get("example_value"), torch.SymInt | torch.SymFloat | torch.SymBool)


def symbols_in(node: fx.Node) -> set[Any]:
    """The symbols in what a node of Dynamo's graph is: a number, or the sizes, strides and offset of a tensor."""
    value = node.meta.get("example_value")
    numbers: list[Any] = [value]
    if isinstance(value, torch.Tensor):
        numbers = [*value.shape]
        if value.layout == torch.strided:
            numbers += [*value.stride(), value.storage_offset()]
    symbolic = (each for each in numbers if isinstance(each, torch.SymInt | torch.SymFloat | torch.SymBool))
    return {symbol for each in symbolic for symbol in expression_of(each).free_symbols}  # type: ignore[arg-type]


def without_nodes(module: fx.GraphModule, nodes: Collection[fx.Node]) -> fx.GraphModule:
    """Dynamo's graph without some nodes, which nothing but its output uses, for AOTAutograd.

    Dynamo asks its own graph what to call the compiled one with, so that one stays. AOTAutograd asks a graph for what
    Dynamo has put on the module and on its inputs (``_dynamo_source``).
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node.op == "output":
            copies[node] = graph.output(tuple(copies[each] for each in cast("Any", node.args[0]) if each not in nodes))
            copies[node].meta = dict(node.meta)
        elif node not in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if hasattr(node, "_dynamo_source"):
                copies[node]._dynamo_source = node._dynamo_source
    made = fx.GraphModule(module, graph)
    for name, value in vars(module).items():
        vars(made).setdefault(name, value)
    made.meta = module.meta
    return made
