"""Assertions about values of tensors, as ops of the step.

``assert (mask.sum(1) > 0).all()`` becomes ``torch._assert_async`` in Dynamo's graph, which returns nothing and would be
dropped with what is dead. Here it is a call of :func:`assert_true`, which returns no element, has an effect and so runs
once, where eager runs it, and raises what eager raises.

An assertion about ``x.item()`` is refused: Dynamo turns it into one of symbols, for which no number is not a number.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect

from ebbflow.errors import CaptureError
from ebbflow.torch_seams.graphs import ASSERTS_TRUE, asserts_on_numbers

__all__ = ["assertions_as_ops"]

_WORDLESS = "assertion error"  # Dynamo's own, where the assertion has no message


@torch.library.custom_op("ebbflow::assert_true", mutates_args=())
def assert_true(condition: Tensor, message: str) -> Tensor:
    """A tensor of no elements, if ``condition``, of one element, is true.

    Raises:
        AssertionError: if it is not; says ``message``.
    """
    if not condition:
        raise AssertionError(message) if message else AssertionError
    return condition.new_empty(0)


@assert_true.register_fake
def _(condition: Tensor, message: str) -> Tensor:
    return condition.new_empty(0)


has_side_effect(torch.ops.ebbflow.assert_true.default)  # else a tracer drops it as dead


def assertions_as_ops(graph: fx.GraphModule) -> None:
    """Replace the assertions in Dynamo's graph by calls of :func:`assert_true`.

    Raises:
        CaptureError: for an assertion about a number.
    """
    nodes = graph.graph
    if asserts_on_numbers(nodes):
        raise CaptureError(
            "the forward asserts something about a number that was read from a tensor (item())",
            remedy="assert on the tensor itself, and the assertion is part of the step: assert (x > 0).all()",
        )
    asserts = list(nodes.find_nodes(op="call_function", target=ASSERTS_TRUE))
    if not asserts:
        return
    for node in asserts:
        condition, *said = node.args
        message = str(said[0]) if said else ""
        with nodes.inserting_before(node):
            nodes.call_function(
                torch.ops.ebbflow.assert_true.default,
                (condition, "" if message == _WORDLESS else message),
            )
        nodes.erase_node(node)
    graph.recompile()
