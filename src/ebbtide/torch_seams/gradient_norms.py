"""How ``clip_grad_norm_`` takes norms and scales: on lists of tensors where the device can, in groups of one kind.

1. Tensors are grouped by device and type, in an order that depends on these alone and on which comes first.
2. The kernels for lists give each tensor what they give it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _foreach_utils as _lists

_torch: Any = torch

__all__ = ["coefficient_of", "norm_of", "scale_by", "total_of"]


def _taken_as_a_list(tensor: torch.Tensor) -> bool:
    return bool(_lists._has_foreach_support([tensor], tensor.device))


def norm_of(gradient: torch.Tensor) -> torch.Tensor:
    """The norm of one gradient among those that ``clip_grad_norm_`` is given (definition 2)."""
    if _taken_as_a_list(gradient):
        (norm,) = _torch._foreach_norm([gradient], 2.0)
        return norm
    return torch.linalg.vector_norm(gradient, 2.0)


def scale_by(gradient: torch.Tensor, coefficient: torch.Tensor) -> None:
    """Multiply one gradient in place, likewise."""
    coefficient = coefficient.to(gradient.device)
    if _taken_as_a_list(gradient):
        _torch._foreach_mul_([gradient], coefficient)
    else:
        gradient.mul_(coefficient)


def total_of(norms: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients together, added up in the order of ``clip_grad_norm_`` (definition 1).

    Args:
        norms: of each, in the order of the model's parameters; maybe of another type than the gradient.
        tensors: of the type and on the device of each.
    """
    if not norms:
        return torch.tensor(0.0)
    groups = _lists._group_tensors_by_device_and_dtype([list(tensors)], with_indices=True)  # type: ignore[list-item]
    in_order = [norms[index].to(norms[0].device) for _, indices in groups.values() for index in indices]
    return torch.linalg.vector_norm(torch.stack(in_order), 2.0)


def coefficient_of(total: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients are multiplied by, 1 at most; the small number is torch's."""
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)
