"""What torch has not tagged as elementwise, and is: a part of the operands gives the same part of the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebbtide.torch_seams import dispatcher

aten = torch.ops.aten
MORE: dict[Any, tuple[Any, ...]] = {
    aten.elu_backward.default: (1.0, 1.0, 1.0, False),
    aten.hardshrink_backward.default: (0.5,),
    aten.hardtanh_backward.default: (-1.0, 1.0),
    aten.leaky_relu_backward.default: (0.01, False),
    aten.softplus_backward.default: (1.0, 20.0),
    aten.softshrink_backward.default: (0.5,),
}
"""Arguments that are no tensors."""
PIECE = 64


@pytest.mark.parametrize("op", sorted(dispatcher._UNTAGGED_POINTWISE, key=str), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_part_of_the_operands_gives_that_part_of_the_result(op: Any, dtype: torch.dtype) -> None:
    assert torch.Tag.pointwise not in op.tags, "torch has tagged it: take it off the list"
    torch.manual_seed(0)
    numbers = iter(MORE.get(op, ()))
    arguments = [
        4 * torch.randn(16 * PIECE).to(dtype) if isinstance(each.type, torch.TensorType) else next(numbers)
        for each in op._schema.arguments
    ]
    whole = op(*arguments)
    for begin in range(0, 16 * PIECE, PIECE):
        piece = slice(begin, begin + PIECE)
        part = op(*(each[piece].clone() if isinstance(each, torch.Tensor) else each for each in arguments))
        assert torch.equal(part, whole[piece])
