"""NumPy's numbers in torch's ops: eager takes them as Python's, Dynamo as tensors, whose type decides the result's.

``loss * np.sqrt(2)`` is of float32 in eager, and of float64 with a tensor in the place of the number;
``x > np.float64(0.1)`` compares in float32, or in float64.

1. A number that follows from constants is computed by NumPy itself, and given to torch's ops as Python's.
2. One that follows from tensors or arrays is refused where an op of torch takes it, unless the op makes a tensor of it.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_arg

from ebbtide.capture.origin import line_of
from ebbtide.errors import CaptureError
from ebbtide.torch_seams.dynamo import is_numpys, makes_tensors, numpy_call, numpy_result, numpys_number, told_anew

__all__ = ["numpy_numbers_as_pythons"]

_WRITES = frozenset("setitem fill put sort itemset iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split())
_ROUNDED = {"add", "sub", "mul", "truediv", "iadd", "isub", "imul", "itruediv"}


def numpy_numbers_as_pythons(module: fx.GraphModule) -> None:
    """Give torch's ops in Dynamo's graph Python's numbers for NumPy's, as eager does.

    Raises:
        CaptureError: at the line that gives an op of torch a number that follows from tensors or arrays.
    """
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            _in_graph(part.graph)
    module.recompile()


def _in_graph(graph: fx.Graph) -> None:
    known: dict[fx.Node, Any] = {}
    anew: set[fx.Node] = set()
    for node in graph.nodes:
        if (number := numpys_number(node)) is not None:
            known[node] = number
        elif numpy_call(node) is not None:
            if (value := _computed(node, known)) is not None:
                known[node] = value
        elif node.op in ("call_function", "call_method") and not makes_tensors(node):
            numbers = {each: known[each].item() for each in node.all_input_nodes if _is_number(known.get(each))}
            for each in node.all_input_nodes:
                if each not in numbers and _is_read(each) and not _is_one_type(node):
                    _refuse(node)
            if numbers and isinstance(node.target, torch._ops.HigherOrderOperator):
                _refuse(node)
            if numbers:
                with_numbers = map_arg((node.args, node.kwargs), lambda each, n=numbers: n.get(each, each))
                node.args, node.kwargs = with_numbers
            if numbers or anew.intersection(node.all_input_nodes):
                told_anew(node)
                anew.add(node)
    for node in reversed(list(known)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _is_number(value: object) -> bool:
    return isinstance(value, np.generic | float | int)


def _computed(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """What NumPy makes of constants; ``None`` if it is of something else, or written to."""
    if any(each not in known for each in node.all_input_nodes):
        return None
    value = numpy_result(node, known)
    if isinstance(value, np.ndarray):
        kept = all(numpy_call(each) is not None and numpy_call(each) not in _WRITES for each in node.users)
        return value if kept else None
    return np.asarray(value)[()] if _is_number(value) else None


def _is_read(node: fx.Node) -> bool:
    """Whether it is a number of NumPy's, or an array without dimensions, that eager takes from somewhere."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dim() == 0 and is_numpys(node)


def _is_one_type(node: fx.Node) -> bool:
    """Whether an op rounds alike with a tensor in a number's place, as all that it takes is of one type."""
    values = [each.meta.get("example_value") for each in node.all_input_nodes]
    types = {value.dtype if isinstance(value, torch.Tensor) else None for value in values}
    name = str(getattr(node.target, "__name__", node.target))
    return name in _ROUNDED and len(values) > 1 and types in ({torch.float32}, {torch.float64})


def _refuse(node: fx.Node) -> NoReturn:
    where = line_of(node)
    reason = "Eager takes a number of NumPy's as Python's, and a captured step as a tensor, whose type may be another."
    raise CaptureError(
        f"{where.shown}. {reason}" if where.text else reason,
        remedy="Keep such numbers as Python's (weights.tolist(), float(weight)) or as tensors, outside of the forward",
        source=where.source,
    )
