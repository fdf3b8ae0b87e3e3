"""The global norm of gradients and what it scales them by, bit for bit as ``clip_grad_norm_`` does it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ebbtide.clipping import Clipping
from ebbtide.torch_seams.gradient_norms import grouped

__all__ = ["coefficient_of", "total_of"]


def total_of(norms: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
    """The norm of all gradients together.

    Args:
        norms: of each, in the order of the model's parameters.
        tensors: of the type and on the device of each.
        clipping: says which norm.

    Raises:
        RuntimeError: if it is infinite or no number and that is to be an error.
    """
    if not norms:
        return torch.tensor(0.0)
    device = norms[0].device
    together = torch.stack([norm.to(device) for norm in grouped(tensors, norms)])
    total = torch.linalg.vector_norm(together, clipping.norm_type)
    if clipping.error_if_nonfinite and torch.logical_or(total.isnan(), total.isinf()):
        raise RuntimeError(
            f"The total norm of order {clipping.norm_type} for gradients from `parameters` is non-finite, so it cannot "
            "be clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`. Nothing has been updated"
        )
    return total


def coefficient_of(total: torch.Tensor, clipping: Clipping) -> torch.Tensor:
    """What gradients are multiplied by, 1 at most; the small number is torch's."""
    return torch.clamp(clipping.max_norm / (total + 1e-6), max=1.0)
