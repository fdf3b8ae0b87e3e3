"""Ops that write over a result which nobody else reads, as one call: what makes the result is in it.

A captured op makes new memory for what it returns. Where it is elementwise and one of its operands dies there, eager
code could have written over that operand (``relu_``). A program has no such ops: each makes buffers and changes none.
So the op that makes the operand and the ones that write over it become one, which calls the same kernels one after
the other, the later ones with ``out=`` the operand. What is written over is never seen outside.

1. An op has an *overwriting form* where torch has a kernel of its own that takes ``out=``; those that torch generates
   make a new result and copy it.
2. It is asked of ops that are elementwise by torch's own account, and of the softmaxes and their gradients, whose
   rows are read before they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ebbtide.errors import InternalError
from ebbtide.rewrites.reference import ReferenceOp, text_of
from ebbtide.torch_seams.dispatcher import OpOverload, is_pointwise, schema_of

__all__ = ["InPlace", "operands_of", "overwriting_form"]

_aten = torch.ops.aten
_ROWS = frozenset(
    {
        _aten._softmax.default,
        _aten._log_softmax.default,
        _aten._softmax_backward_data.default,
        _aten._log_softmax_backward_data.default,
    }
)


def overwriting_form(op: object) -> tuple[OpOverload, str] | None:
    """What to call in the place of ``op``, and its argument that is written to."""
    if not isinstance(op, OpOverload) or op.namespace != "aten" or not (is_pointwise(op) or op in _ROWS):
        return None
    schema = schema_of(op)
    if schema.is_mutable or len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor":
        return None
    wanted = [(each.name, str(each.type)) for each in schema.arguments]
    for name in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, name)
        *same, last = schema_of(other).arguments
        if last.is_out and torch.Tag.generated not in other.tags:
            if [(each.name, str(each.type)) for each in same] == wanted:
                return other, last.name
    return None


class InPlace(ReferenceOp):
    """The target of a call: a few captured ops, some of which write over what one of those before has made.

    Args:
        reference: the ops.
        over: of those that write over an operand, which (:func:`operands_of`).
    """

    def __init__(self, reference: fx.Graph, over: Mapping[fx.Node, int]) -> None:
        super().__init__("in_place", reference, f"in_place[{'; '.join(text_of(reference)[0])}]")
        self.over = dict(over)
        self._run: Callable[..., Any] = self._first_run

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """What the ops give for ``tensors``."""
        return self._run(*tensors)

    def _first_run(self, *tensors: torch.Tensor) -> Any:
        """The first call, looking at what is written over: a kernel might return memory that it was given."""
        module = fx.GraphModule(torch.nn.Module(), self._overwriting())  # most calls are looked at, and few are made
        result = _Watched(module, tensors).run(*tensors)
        self._run = module.forward
        return result

    def _overwriting(self) -> fx.Graph:
        """The reference graph with the overwriting forms of its ops."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.reference.nodes:
            copies[node] = made = graph.node_copy(node, copies.__getitem__)
            if node in self.over and (form := overwriting_form(node.target)) is not None:
                made.target, out = form
                made.update_kwarg(out, operands_of(made)[self.over[node]])
        return graph


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The tensors among the positional arguments of a call that are no lists, in order."""
    return [each for each in node.args if isinstance(each, fx.Node)]


class _Watched(fx.Interpreter):
    """Runs a graph and refuses to write to what it was given."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__(module)
        self._input_addresses = {each.untyped_storage().data_ptr() for each in inputs if each.numel()}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``target`` unless it would write to one of the graph's inputs."""
        if isinstance(target, OpOverload):
            for each in schema_of(target).arguments:
                if each.is_out and kwargs[each.name].untyped_storage().data_ptr() in self._input_addresses:
                    raise InternalError(f"{target} would write to an argument of the call that it is part of")
        return super().call_function(target, args, kwargs)
