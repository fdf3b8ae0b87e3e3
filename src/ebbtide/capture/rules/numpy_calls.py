"""NumPy in a forward: Dynamo takes torch's ops in its place, whose sums, powers and roots have other bits.

What torch computes as NumPy does, bit for bit, stays: whatever moves or compares values, arithmetic that both round
correctly, all that gives integers, and constants on which both agree. The rest is refused with its line. (Roots are the
vector library's where torch was built with MKL, and differ.)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import fx

from ebbtide.capture.origin import line_of
from ebbtide.errors import CaptureError
from ebbtide.torch_seams.dynamo import numpy_call

__all__ = ["JOINS", "SAME", "refuse_numpy_sums"]

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
JOINS = frozenset("concatenate getitem hstack setitem stack vstack".split())
"""Of these, what takes several arrays at once."""
SAME = frozenset(f"{_MOVES} {_ROUNDED}".split())
"""Functions, methods and attributes of NumPy whose bits torch's are, each held against NumPy's in the tests."""


def refuse_numpy_sums(graph: fx.GraphModule) -> None:
    """Raise for Dynamo's ``graph`` if it computes by torch what eager computes by NumPy with other bits.

    Raises:
        CaptureError: at the line of the call.
    """
    parts = [each.graph for each in graph.modules() if isinstance(each, fx.GraphModule)]  # also autograd.Function's
    for node in (node for part in parts for node in part.nodes):
        name = numpy_call(node)
        if name is None or (name in SAME and (name in JOINS or not _takes_lists(node))):
            continue
        if _gives_integers(node) or _gives_the_same(node, name):
            continue
        where = line_of(node)
        reason = f"NumPy computes {name} in eager, and torch would in a captured step, with other last bits."
        raise CaptureError(
            f"{where.shown}. {reason}" if where.text else reason,
            remedy="Compute it with torch (x.mean(0) for x.numpy().mean(0)), or before the call, and give the forward "
            "what comes of it",
            op=f"numpy.{name}",
            source=where.source,
        )


def _takes_lists(node: fx.Node) -> bool:
    """Whether it is given arrays in a list, which NumPy joins in their own type and torch in float64."""
    return any(isinstance(each, list | tuple) and any(isinstance(e, fx.Node) for e in each) for each in node.args)


def _gives_integers(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()


def _gives_the_same(node: fx.Node, name: str) -> bool:
    """Of Python's numbers alone, as in ``np.log(2)``: whether both come to one answer."""
    function = getattr(np, name, None)
    if node.all_input_nodes or function is None or not callable(node.target):
        return False
    return bool(np.array_equal(function(*node.args, **node.kwargs), np.asarray(node.target(*node.args, **node.kwargs))))
