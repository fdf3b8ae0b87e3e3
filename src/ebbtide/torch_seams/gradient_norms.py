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

__all__ = ["grouped", "norm_of", "scale_by"]


def _taken_as_a_list(tensor: torch.Tensor, foreach: bool | None) -> bool:
    device = tensor.device
    if foreach is None:
        return bool(_lists._has_foreach_support([tensor], device))
    if foreach and not _lists._device_has_foreach_support(device):
        raise RuntimeError(f"foreach=True was passed, but can't use the foreach API on {device.type} tensors")
    return foreach


def norm_of(gradient: torch.Tensor, norm_type: float, foreach: bool | None) -> torch.Tensor:
    """The norm of one gradient among those that ``clip_grad_norm_`` is given (definition 2)."""
    if _taken_as_a_list(gradient, foreach):
        (norm,) = _torch._foreach_norm([gradient], norm_type)
        return norm
    return torch.linalg.vector_norm(gradient, norm_type)


def scale_by(gradient: torch.Tensor, coefficient: torch.Tensor, foreach: bool | None) -> None:
    """Multiply one gradient in place, likewise."""
    coefficient = coefficient.to(gradient.device)
    if _taken_as_a_list(gradient, foreach):
        _torch._foreach_mul_([gradient], coefficient)
    else:
        gradient.mul_(coefficient)


def grouped(tensors: Sequence[torch.Tensor], norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``norms``, each of one of ``tensors``, in the order in which ``clip_grad_norm_`` adds them up (definition 1).

    Args:
        tensors: of the type and on the device of the gradients, whose norms may be of another type.
        norms: one of each.
    """
    groups = _lists._group_tensors_by_device_and_dtype([list(tensors)], with_indices=True)  # type: ignore[list-item]
    return [norms[index] for (_, indices) in groups.values() for index in indices]
