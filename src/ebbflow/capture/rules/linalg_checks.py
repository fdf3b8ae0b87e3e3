"""The check that a factorisation has succeeded, as an op of the step.

``torch.linalg.inv``, ``solve``, ``cholesky`` and their kin raise for a matrix that cannot be factored:
``aten._linalg_check_errors`` reads what the kernel found. It returns nothing; torch keeps it in a graph by tokens that
are inputs and outputs of the step. Here it is a call of :func:`check_factorisation`, which returns no element, has an
effect and so runs once, where eager runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from ebbflow.torch_seams.dispatcher import traced_as

__all__ = ["checks_as_ops"]

_CHECK = torch.ops.aten._linalg_check_errors.default


@torch.library.custom_op("ebbflow::check_factorisation", mutates_args=())
def check_factorisation(info: Tensor, name: str, is_matrix: bool) -> Tensor:
    """A tensor of no elements, if ``info`` says that the factorisation of function ``name`` succeeded."""
    _CHECK(info, name, is_matrix=is_matrix)
    return info.new_empty(0)


@check_factorisation.register_fake
def _(info: Tensor, name: str, is_matrix: bool) -> Tensor:
    return info.new_empty(0)


has_side_effect(torch.ops.ebbflow.check_factorisation.default)  # else a tracer drops it as dead


@contextmanager
def checks_as_ops() -> Iterator[None]:
    """While open, checks of factorisations are traced on this thread as ops that return a tensor."""
    with traced_as(_CHECK, _as_op):
        yield


def _as_op(_: Callable[..., Any]) -> Callable[..., None]:
    def check(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
        torch.ops.ebbflow.check_factorisation.default(info, api_name, is_matrix)

    return check
