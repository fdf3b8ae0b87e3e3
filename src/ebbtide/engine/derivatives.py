"""Derivatives that a planned step does not have, refused by name: a step is one forward and one backward.

1. Inside of ``torch.func``'s transforms (``grad``, ``vmap``, ``jvp``) and of forward-mode AD, a call gets tensors that
   stand for others: nothing can be planned for them.
2. A gradient of a gradient: the backward of a step is no graph of its own. ``create_graph=True`` alone is harmless;
   what comes next through the step's gradients is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.errors import CaptureError
from ebbtide.torch_seams.autograd import active_transform

__all__ = ["refuse_second_derivative", "refuse_transforms"]

_INSIDE = (
    "take the derivative inside of the forward, where it becomes part of the step (torch.autograd.grad(..., "
    "create_graph=True), torch.func.grad)"
)


def refuse_transforms() -> None:
    """Refuse a call inside of a transform of ``torch.func`` (definition 1).

    Raises:
        CaptureError: naming the transform.
    """
    transform = active_transform()
    if transform:
        raise CaptureError(
            f"the fitted model was called inside of {transform}, for whose tensors no step can be planned",
            remedy=f"{_INSIDE}, or call the plain model: fit another one, or ebbtide.unfit(model)",
        )


def refuse_second_derivative(gradients: tuple[torch.Tensor | None, ...], _: Any) -> None:
    """Refuse a derivative of a gradient (definition 2).

    A hook behind a step's own node, which sees the gradients that leave it.
    """
    for node in {each.grad_fn for each in gradients if each is not None and each.grad_fn is not None}:
        node.register_prehook(_refuse)


def _refuse(_: Any) -> None:
    raise CaptureError(
        "a second derivative was asked for, through gradients that a planned step gave (create_graph=True)",
        remedy=f"{_INSIDE}, or call the plain model for that step (ebbtide.unfit(model))",
    )
