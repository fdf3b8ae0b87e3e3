"""Reentrant checkpoints over data alone, which train nothing in eager and would in Dynamo's graph.

``checkpoint(f, x, use_reentrant=True)`` runs ``f`` without a graph and hangs one node between its tensor arguments and
its results. Where none of them takes a gradient there is no node, and the parameters of ``f`` get no gradient. Dynamo
traces both kinds of checkpoints alike, so the results of such a one are detached here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ebbtide.torch_seams.patches import Attribute, wrapped

__all__ = ["CUT", "reentrant_checkpoints_cut"]

CUT = "a reentrant checkpoint none of whose arguments takes a gradient returns something else than tensors"
"""The text of a refusal: what it returns trains nothing in eager."""


@contextmanager
def reentrant_checkpoints_cut() -> Iterator[None]:
    """While open, captures of this thread cut the graph at such checkpoints."""
    from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable as Checkpoint

    name = "_call_function" if "_call_function" in vars(Checkpoint) else "call_function"
    with wrapped(Attribute(Checkpoint, name), _cutting, this_thread=True):
        yield


def _cutting(below: Callable[..., Any]) -> Callable[..., Any]:
    def call(owner: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        given = kwargs.get("use_reentrant")
        reentrant = given is None or bool(given.as_python_constant())  # torch takes it for true where it is left out
        cut = reentrant and torch.is_grad_enabled() and not any(map(_takes_gradient, args[1:]))
        result = below(owner, tx, args, kwargs)
        return _detached(tx, result) if cut else result

    return call


def _takes_gradient(variable: Any) -> bool:
    """Whether it is a tensor that takes one; torch's checkpoint looks into no container either."""
    from torch._dynamo.variables import TensorVariable

    variable = variable.realize()
    return isinstance(variable, TensorVariable) and variable.as_proxy().node.meta["example_value"].requires_grad


def _detached(tx: Any, result: Any) -> Any:
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.variables import ListVariable, TensorVariable, TupleVariable

    if isinstance(result, TensorVariable):
        return result.call_method(tx, "detach", [], {})
    if type(result) in (TupleVariable, ListVariable):
        return type(result)([_detached(tx, each) for each in result.items], mutation_type=result.mutation_type)
    if result.is_python_constant():
        return result
    raise Unsupported(CUT)
