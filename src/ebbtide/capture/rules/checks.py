"""Checks that the forward makes of values, as ops of the step.

A check returns nothing, so that a graph drops it with what is dead, or keeps it by tokens that are inputs and outputs
of the step. Here each is a call of an op of ours, which returns no element, has an effect and so runs once, where eager
runs it, and raises what eager raises.

1. ``assert (mask.sum(1) > 0).all()`` is ``torch._assert_async`` in Dynamo's graph, and becomes :func:`check_true`. An
   assertion about ``x.item()`` is refused: Dynamo turns it into one of symbols, for which no number is not a number.
2. Other checks of values (``torch._check_tensor_all``, a branch that does nothing but raise: ``torch_seams.checks``)
   are traced as calls of it.
3. ``torch.linalg.inv``, ``solve``, ``cholesky`` and their kin raise for a matrix that cannot be factored:
   ``aten._linalg_check_errors`` reads what the kernel found, and is traced as :func:`check_factorisation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect

from ebbtide.capture.origin import SourceLine, line_of
from ebbtide.errors import CaptureError
from ebbtide.torch_seams.checks import Raised
from ebbtide.torch_seams.dispatcher import traced_as
from ebbtide.torch_seams.graphs import ASSERTS_TRUE, asserts_on_numbers, number_read

__all__ = ["CHECK_TRUE", "assertions_as_ops", "factorisation_checks_as_ops"]

_WORDLESS = "assertion error"  # Dynamo's own, where the assertion has no message
_ASSERTION = "builtins:AssertionError"
_ABOUT_A_NUMBER = "The forward asserts something about a number that was read from a tensor (item())"
_CHECK = torch.ops.aten._linalg_check_errors.default


@torch.library.custom_op("ebbtide::check_true", mutates_args=())
def check_true(condition: Tensor, kind: str, message: str, tensors: list[Tensor]) -> Tensor:
    """A tensor of no elements, if ``condition``, of one element, is true.

    Raises:
        Exception: if it is not: of class ``kind``, with a message that tells the values of ``tensors`` (``Raised``).
    """
    if not condition:
        raise Raised(kind, message).error(tensors)
    return condition.new_empty(0)


@torch.library.custom_op("ebbtide::check_factorisation", mutates_args=())
def check_factorisation(info: Tensor, name: str, is_matrix: bool) -> Tensor:
    """A tensor of no elements, if ``info`` says that the factorisation of function ``name`` succeeded."""
    _CHECK(info, name, is_matrix=is_matrix)
    return info.new_empty(0)


@check_true.register_fake
@check_factorisation.register_fake
def _(read: Tensor, *_: object) -> Tensor:
    return read.new_empty(0)


CHECK_TRUE = torch.ops.ebbtide.check_true.default
for _op in (CHECK_TRUE, torch.ops.ebbtide.check_factorisation.default):
    has_side_effect(_op)  # else a tracer drops it as dead


def assertions_as_ops(graph: fx.GraphModule) -> None:
    """Replace the assertions in Dynamo's graph by calls of :func:`check_true`.

    Raises:
        CaptureError: for an assertion about a number.
    """
    nodes = graph.graph
    if asserts_on_numbers(nodes):
        number = number_read(nodes)
        where = line_of(number) if number is not None else SourceLine("", "")
        raise CaptureError(
            f"{where.shown}. {_ABOUT_A_NUMBER}" if where.text else _ABOUT_A_NUMBER,
            remedy="assert on the tensor itself, and the assertion is part of the step: assert (x > 0).all()",
            source=where.source,
        )
    asserts = list(nodes.find_nodes(op="call_function", target=ASSERTS_TRUE))
    if not asserts:
        return
    for node in asserts:
        condition, *said = node.args
        message = str(said[0]) if said else ""
        with nodes.inserting_before(node):
            nodes.call_function(CHECK_TRUE, (condition, _ASSERTION, "" if message == _WORDLESS else message, []))
        nodes.erase_node(node)
    graph.recompile()


@contextmanager
def factorisation_checks_as_ops() -> Iterator[None]:
    """While open, checks of factorisations are traced on this thread as calls of :func:`check_factorisation`."""
    with traced_as(_CHECK, _as_op):
        yield


def _as_op(_: Callable[..., Any]) -> Callable[..., None]:
    def check(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
        torch.ops.ebbtide.check_factorisation.default(info, api_name, is_matrix)

    return check
