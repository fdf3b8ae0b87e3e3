"""Matrix products whose sizes are symbols, on releases whose compiled kernel makes numbers of them.

Up to torch 2.12 ``matmul`` in C++ asks for sizes as numbers, so that nothing with such a product can be captured for
many shapes. Torch's kernel in Python does not. It is traced where both are known to be the same calls:

1. of batches of matrices, alike in their batches: ``expand`` and ``reshape`` to three dimensions, ``bmm``, a view;
2. of a batch of matrices by one matrix: the batch is folded into rows for ``mm`` if the matrix takes a gradient or the
   batch is contiguous, and else as under 1.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ebbtide.torch_seams.dispatcher import composite
from ebbtide.torch_seams.fake_tensors import FakeTensorMode, without_modes
from ebbtide.torch_seams.graphs import expression_of

__all__ = ["compiled_product_keeps_symbols", "symbols_stay_in_python"]


def symbols_stay_in_python(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the kernel in Python is to be traced for the product of two tensors; nothing is asked of a symbol."""
    sizes = [*first.shape, *second.shape]
    if not any(isinstance(size, torch.SymInt) for size in sizes) or compiled_product_keeps_symbols():
        return False
    if first.dim() < 3 or second.dim() == 2:
        return first.dim() >= 3
    return first.dim() == second.dim() and all(map(_same, first.shape[:-2], second.shape[:-2]))


def _same(one: Any, other: Any) -> bool:
    one, other = (expression_of(each) if isinstance(each, torch.SymInt) else each for each in (one, other))
    return bool(one == other)  # of expressions: the same, letter for letter


@functools.cache
def compiled_product_keeps_symbols() -> bool:
    """Whether ``matmul`` in C++ leaves symbols what they are: it is tried."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    changing = StatelessSymbolicContext([DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    with without_modes():
        mode = FakeTensorMode(shape_env=ShapeEnv())
        rows = mode.from_tensor(torch.empty(2, 5, 3), symbolic_context=changing)
        with mode:
            product = composite(torch.ops.aten.matmul.default, rows, rows.mT)
    return isinstance(product.shape[1], torch.SymInt)
