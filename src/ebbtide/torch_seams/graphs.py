"""FX graphs: the code that is generated for them, what tracing writes on their nodes, and sizes that are symbols."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx
from torch._guards import TracingContext
from torch.fx._lazy_graph_module import _LazyGraphModule

if TYPE_CHECKING:
    import sympy

__all__ = [
    "ASSERTS_TRUE",
    "arguments_of",
    "asserts_on_numbers",
    "data_dependent_guard_type",
    "expression_of",
    "hint_of",
    "is_checkpointed",
    "is_read_number",
    "module_stack_of",
    "number_read",
    "size_source",
    "stack_trace_of",
    "uncompiled_module",
    "with_code",
]


ASSERTS_TRUE: Any = torch._assert_async  # type: ignore[attr-defined]
"""What an ``assert`` on a tensor is in Dynamo's graph: of one element, with the message."""


def uncompiled_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module of ``graph`` whose code is generated once it is asked for: until then the graph may still change.

    Args:
        root: has the constants that the graph reads.
        graph: of the module.
    """
    return _LazyGraphModule(root, graph)


def with_code(module: fx.GraphModule) -> fx.GraphModule:
    """``module`` with the code of its graph as that is now."""
    module.recompile()
    _LazyGraphModule.force_recompile(module)
    return module


def asserts_on_numbers(graph: fx.Graph) -> bool:
    """Whether the forward that this thread captures asserts something about a number that only data tell.

    Asked in a backend. Dynamo hands such assertions to the shape environment, which writes out some of them. Where a
    size or a place depends on data torch's operators assert things themselves.

    Args:
        graph: Dynamo's.
    """
    context = TracingContext.try_get()
    env = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    asserted = [] if env is None else [each for some in env.deferred_runtime_asserts.values() for each in some]
    if all(map(_is_an_ops, asserted)):
        return False
    values = (node.meta.get("example_value") for node in graph.nodes)
    sizes = (size for value in values if isinstance(value, torch.Tensor) for size in value.shape)
    return not any(isinstance(size, torch.SymInt) for size in sizes)


def _is_an_ops(assertion: Any) -> bool:
    """Whether an operator has made the ``assertion``, while its result was described: no code of the user's."""
    stack = assertion.stack
    return stack is not None and any(frame.name == "__torch_dispatch__" for frame in stack.summary())


def is_read_number(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph is an integer that only data tell."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    value = node.meta.get("example_value")
    return isinstance(value, torch.SymInt) and bool(free_unbacked_symbols(value))


def number_read(graph: fx.Graph) -> fx.Node | None:
    """What reads a number from a tensor in Dynamo's ``graph``, or the tensor of one element that has no reader left."""
    numbers: list[fx.Node] = []
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return node
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not node.users and node.op != "placeholder":
            numbers.append(node)
    return next(iter(numbers), None)


def is_checkpointed(node: fx.Node) -> bool:
    """Whether a checkpoint of the model's would run ``node`` again in the backward."""
    return node.meta.get("ac_graph_id") is not None or node.meta.get("recompute") is not None


def stack_trace_of(node: fx.Node) -> str:
    """The frames that issued a node, as Python prints them, or ``""``; a backward's node has its forward's."""
    return node.meta.get("stack_trace") or ""


def module_stack_of(node: fx.Node) -> Mapping[str, tuple[str, Any]]:
    """Path and class of each module in whose forward a node was issued, from the outermost on; may be empty.

    A forward's node has ``nn_module_stack``, a backward's ``fwd_nn_module_stack``.
    """
    return node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}


def expression_of(size: torch.SymInt) -> sympy.Expr:
    """What a symbolic size is, in symbols."""
    import sympy  # takes longer to import than the rest of Ebbtide

    return sympy.sympify(size.node.expr)


def hint_of(size: torch.SymInt) -> int:
    """What a symbolic size was in the call that was captured."""
    return int(size.node.hint)  # type: ignore[arg-type]


def size_source(size: torch.SymInt) -> str | None:
    """A symbolic size as an expression of what Dynamo calls the inputs; ``None`` if a symbol is from none."""
    from torch.utils._sympy.printers import PythonPrinter

    expression = expression_of(size)
    known = size.node.shape_env.var_to_sources
    sources = {str(symbol): known.get(symbol) for symbol in expression.free_symbols}
    if not all(sources.values()):
        return None

    def source(found: re.Match[str]) -> str:
        return f"({sources[found[0]][0].name})" if found[0] in sources else found[0]

    return re.sub(r"\b[a-z]+\d+\b", source, PythonPrinter().doprint(expression))


def data_dependent_guard_type() -> type[Exception]:
    """What symbolic shapes raise where Python asks for a number that only data could tell."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode


def arguments_of(node: fx.Node) -> tuple[Any, ...]:
    """Positional arguments of a call, which ``torch.fx`` types as anything that a graph may hold."""
    return cast("tuple[Any, ...]", node.args)
