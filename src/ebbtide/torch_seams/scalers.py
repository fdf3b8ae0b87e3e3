"""What a gradient scaler does to gradients, and how it is told what has become of them.

1. It looks for elements that are not finite before it divides by its scale, with one call of a kernel, which changes
   nothing where it is to multiply by 1.
2. It unscales the gradients of an optimizer in one method, which returns by device whether some were not finite. That
   method is asked here what is known of gradients that are not there any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from ebbtide.torch_seams.patches import Attribute, Patch, wrapped

__all__ = ["inverse_scale_of", "multiply_and_check", "unscales_itself", "unscaling_answered"]

_torch: Any = torch


def inverse_scale_of(scaler: GradScaler) -> torch.Tensor | None:
    """What gradients are multiplied by, as ``unscale_`` computes it; ``None`` before it has scaled a loss."""
    scale: torch.Tensor | None = scaler._scale
    return None if scale is None else scale.double().reciprocal().float()


def multiply_and_check(gradient: torch.Tensor, found_inf: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply in place, and set ``found_inf`` to 1 if an element is not finite (definition 1)."""
    _torch._amp_foreach_non_finite_check_and_unscale_([gradient], found_inf, factor)


def unscaling_answered(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    hidden: Callable[[], AbstractContextManager[tuple[Iterable[torch.device], bool]]],
) -> Patch:
    """Tell ``scaler`` of gradients that it is not shown, until the patch is closed (definition 2).

    Args:
        scaler: not kept alive.
        optimizer: whose gradients it unscales; not kept alive.
        hidden: open while it looks at what there is; gives the devices of what there is not, and whether any of it
            was not finite.
    """
    own_scaler, own_optimizer = weakref.ref(scaler), weakref.ref(optimizer)

    def answered(below: Callable[..., Any]) -> Callable[..., Any]:
        def unscale(
            asking: GradScaler, of: torch.optim.Optimizer, inverse: Any, found: torch.Tensor, *rest: Any
        ) -> Any:
            if asking is not own_scaler() or of is not own_optimizer():
                return below(asking, of, inverse, found, *rest)
            with hidden() as (devices, is_found):
                places: dict[torch.device, torch.Tensor] = below(asking, of, inverse, found, *rest)
            for device in devices:
                place = places.setdefault(device, found.to(device=device, copy=True))
                if is_found:
                    place.fill_(1.0)
            return places

        return unscale

    return wrapped(Attribute(GradScaler, "_unscale_grads_"), answered, lasting=True).open()


def unscales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the kernel of the optimizer's step is handed the scale, as fused ones are."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
