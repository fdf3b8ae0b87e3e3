"""NumPy in a forward: Dynamo takes torch's ops in its place, whose sums, powers and roots have other bits.

What torch computes as NumPy does, bit for bit, stays: whatever moves or compares values, arithmetic that both round
correctly, and all that gives integers. The rest is refused with its line. (Roots are the vector library's where torch
was built with MKL, and differ.) Numbers that follow from constants alone are constants (``torch_seams.numpy_numbers``);
one that follows from tensors or arrays is Python's to an op of torch's in eager, and a tensor in the graph, whose type
may decide the result's: refused too, unless all that the op takes is of one type, or it makes a tensor of the number.
"""

from __future__ import annotations

import torch
from torch import fx

from ebbtide.capture.origin import line_of
from ebbtide.errors import CaptureError
from ebbtide.torch_seams.dynamo import numpy_call
from ebbtide.torch_seams.numpy_numbers import is_numpys, makes_tensors

__all__ = ["JOINS", "SAME", "refuse_numpy"]

_MOVES = (
    "array asarray astype atleast_1d atleast_2d broadcast_to concatenate copy empty expand_dims eye flip fliplr "
    "flipud full full_like getitem hstack item moveaxis ones ones_like permute ravel repeat reshape roll rollaxis "
    "setitem sort split squeeze stack swapaxes T take tile transpose tril triu view vstack zeros zeros_like "
    "flatten real pad"
)
_ROUNDED = (
    "abs absolute add amax amin ceil clip divide fabs floor fmax fmin max maximum min minimum mul multiply neg "
    "negative pos positive rint round sign square sub subtract truediv true_divide trunc iadd isub imul itruediv"
)
_ARITHMETIC = frozenset("add sub mul truediv iadd isub imul itruediv".split())
JOINS = frozenset("concatenate getitem hstack setitem stack vstack".split())
"""Of these, what takes several arrays at once."""
SAME = frozenset(f"{_MOVES} {_ROUNDED}".split())
"""Functions, methods and attributes of NumPy whose bits torch's are, each held against NumPy's in the tests."""


def refuse_numpy(graph: fx.GraphModule) -> None:
    """Raise for Dynamo's ``graph`` if it computes by torch what eager computes by NumPy with other bits.

    Raises:
        CaptureError: at the line of the call.
    """
    parts = [each.graph for each in graph.modules() if isinstance(each, fx.GraphModule)]  # also autograd.Function's
    for node in (node for part in parts for node in part.nodes):
        name = numpy_call(node)
        if name is None:
            _refuse_numbers(node)
        elif not (name in SAME and (name in JOINS or not _takes_lists(node))) and not _gives_integers(node):
            raise _error(
                node,
                f"NumPy computes {name} in eager, and torch would in a captured step, with other last bits.",
                "Compute it with torch (x.mean(0) for x.numpy().mean(0)), or before the call, and give the forward "
                "what comes of it",
                f"numpy.{name}",
            )


def _refuse_numbers(node: fx.Node) -> None:
    """Raise for an op of torch's that is given a number that follows from tensors or arrays."""
    if node.op not in ("call_function", "call_method") or makes_tensors(node):
        return
    if any(map(_is_number, node.all_input_nodes)) and not _is_of_one_type(node):
        raise _error(
            node,
            "Eager takes a number of NumPy's as Python's, and a captured step as a tensor, whose type may be another.",
            "Keep such numbers as Python's (weights.tolist(), float(weight)) or as tensors, outside of the forward",
        )


def _is_number(node: fx.Node) -> bool:
    """Whether it is a number of NumPy's, or an array without dimensions."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dim() == 0 and is_numpys(node)


def _is_of_one_type(node: fx.Node) -> bool:
    """Whether an op rounds alike with a tensor in a number's place."""
    values = [each.meta.get("example_value") for each in node.all_input_nodes]
    types = {value.dtype if isinstance(value, torch.Tensor) else None for value in values}
    name = str(getattr(node.target, "__name__", node.target))
    return name in _ARITHMETIC and len(values) > 1 and types in ({torch.float32}, {torch.float64})


def _error(node: fx.Node, reason: str, remedy: str, op: str = "") -> CaptureError:
    where = line_of(node)
    told = f"{where.shown}. {reason}" if where.text else reason
    return CaptureError(told, remedy=remedy, op=op, source=where.source)


def _takes_lists(node: fx.Node) -> bool:
    """Whether it is given arrays in a list, which NumPy joins in their own type and torch in float64."""
    return any(isinstance(each, list | tuple) and any(isinstance(e, fx.Node) for e in each) for each in node.args)


def _gives_integers(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()
