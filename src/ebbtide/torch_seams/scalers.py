"""What a gradient scaler does to gradients, and how it is told what has become of them.

1. It looks for elements that are not finite before it divides by its scale, with one call of a kernel, which changes
   nothing where it is to multiply by 1.
2. It asks every parameter for its gradient in one function, whose frame has the places where it keeps what it found.
"""

from __future__ import annotations

import inspect
from types import CodeType, FrameType
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

__all__ = ["inverse_scale_of", "is_unscaling", "multiply_and_check", "tell_found", "unscales_itself"]

_torch: Any = torch
_UNSCALING: CodeType = inspect.unwrap(GradScaler._unscale_grads_).__code__


def inverse_scale_of(scaler: GradScaler) -> torch.Tensor | None:
    """What gradients are multiplied by, as ``unscale_`` computes it; ``None`` before it has scaled a loss."""
    scale: torch.Tensor | None = scaler._scale
    return None if scale is None else scale.double().reciprocal().float()


def multiply_and_check(gradient: torch.Tensor, found: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply in place, and set ``found`` to 1 if an element is not finite (definition 1)."""
    _torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, factor)


def is_unscaling(frame: FrameType) -> bool:
    """Whether it is a scaler that asks (definition 2)."""
    return frame.f_code is _UNSCALING


def tell_found(frame: FrameType, device: torch.device, *, found: bool) -> None:
    """Let the scaler of ``frame`` know of a gradient that it is not shown (definition 2)."""
    place = frame.f_locals["per_device_found_inf"].get(device)
    if found:
        place.fill_(1.0)


def unscales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the kernel of the optimizer's step is handed the scale, as fused ones are."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
