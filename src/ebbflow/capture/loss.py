"""Which outputs of a forward take gradients: where there is a loss among them, nothing else does.

A forward that returns ``(loss, logits)`` makes autograd pass a gradient of zeros for the logits, as large as they
are, unless somebody computes with them. So where a scalar that requires a gradient is among the outputs
1. every other floating-point output is detached inside the captured step (:func:`loss_only`, which Dynamo traces);
2. what the caller gets in its place requires a gradient as before, and raises if one arrives (:func:`guarded`).
A forward without a scalar among its outputs has its loss outside; all its outputs take gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ebbflow.errors import CaptureError
from ebbflow.torch_seams import trees as pytree

__all__ = ["guarded", "loss_only"]


def loss_only(outputs: Any) -> tuple[Any, list[torch.Tensor]]:
    """``outputs`` with all but the scalars detached, if one of these requires a gradient; and what was detached."""
    if not _has_loss(outputs):
        return outputs, []
    detached: list[torch.Tensor] = []
    return _detach(outputs, detached), detached


def _has_loss(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad and value.numel() == 1
    if isinstance(value, dict):
        return any(_has_loss(v) for v in value.values())
    if isinstance(value, tuple | list):
        return any(_has_loss(v) for v in value)
    return False


def _detach(value: Any, detached: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.requires_grad or value.numel() == 1:
            return value
        value = value.detach()
        detached.append(value)
        return value
    if isinstance(value, dict):
        items = {key: _detach(v, detached) for key, v in value.items()}
        # Hugging Face's outputs are ordered dictionaries that take their fields by keyword.
        return items if type(value) is dict else type(value)(**items)
    if isinstance(value, list):
        return [_detach(v, detached) for v in value]
    if isinstance(value, tuple):
        items = [_detach(v, detached) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


class _TakesNoGradient(torch.autograd.Function):
    """The tensor itself, requiring a gradient because the anchor does."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, _anchor: torch.Tensor) -> torch.Tensor:
        ctx.shape = tuple(tensor.shape)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise CaptureError(
            f"a gradient arrived for an output of shape {ctx.shape} that is not the loss. The forward returns a scalar "
            "loss beside it, so the step was planned without a gradient through this output, and no gradient of the "
            "step was handed out",
            remedy='use ebbflow.fit(..., gradients="all") to plan for gradients through every output',
        )


def guarded(outputs: Any, detached: Sequence[torch.Tensor]) -> Any:
    """``outputs`` of a step with what :func:`loss_only` detached made to raise when a gradient arrives."""
    if not detached:
        return outputs
    anchor = torch.zeros(0, requires_grad=True)
    places = {id(tensor) for tensor in detached}

    def guard(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) in places:
            return _TakesNoGradient.apply(value, anchor)
        return value

    return pytree.tree_map(guard, outputs)
