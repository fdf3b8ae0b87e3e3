"""Ops that make each number of those in its place, which may be done to any part of a tensor."""

from __future__ import annotations

import torch
from torch import fx

from ebbtide.capture.traits import draws_random
from ebbtide.torch_seams.dispatcher import OpOverload, is_pointwise, schema_of

__all__ = ["is_elementwise"]


def is_elementwise(node: fx.Node) -> bool:
    """Whether each number of the one result is made of those in its place, and of nothing drawn."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or draws_random(node):
        return False
    if target is torch.ops.aten._to_copy.default:
        (source,) = node.all_input_nodes
        strided = node.kwargs.get("layout") in (None, torch.strided)
        plain = set(node.kwargs) <= {"dtype", "layout", "device"} and strided
        return plain and source.meta["val"].device == node.meta["val"].device
    schema = schema_of(target)
    one = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor" and not schema.is_mutable
    return one and is_pointwise(target)
