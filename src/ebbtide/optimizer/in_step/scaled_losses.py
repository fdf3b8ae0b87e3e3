"""A loss that a gradient scaler has scaled is no loss to update by: its backward would step by scaled gradients.

Gradients are applied in the backward, before a scaler can take its scale out of them and look whether they are finite.
So it is refused when it scales the loss of a step that updates, and nothing has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.errors import UsageError
from ebbtide.torch_seams.autograd import outputs_reached
from ebbtide.torch_seams.patches import Attribute, wrapped
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["ScaledLosses"]


class ScaledLosses:
    """Watches what scalers scale, for one optimizer that steps in backwards, until it is closed or garbage."""

    def __init__(self) -> None:
        self._nodes: weakref.WeakSet[Any] = weakref.WeakSet()
        nodes = self._nodes

        def refusing(scale: Callable[..., Any]) -> Callable[..., Any]:
            def scaled(scaler: Any, outputs: Any) -> Any:
                if scaler.is_enabled() and any(outputs_reached(_tensors_in(outputs), node) for node in list(nodes)):
                    raise UsageError(
                        'Take step="outside", or train in bfloat16, which needs no scaler: a GradScaler scales the '
                        'loss of a step whose backward updates the weights (step="inside"), by gradients that '
                        "nobody could unscale. Nothing has been updated"
                    )
                return scale(scaler, outputs)

            return scaled

        self._patch = wrapped(Attribute(torch.amp.GradScaler, "scale"), refusing, lasting=True).open()

    def add(self, node: Any) -> None:
        """A step has run whose backward, at ``node``, updates."""
        self._nodes.add(node)

    def close(self) -> None:
        """No step updates any more."""
        self._patch.close()


def _tensors_in(outputs: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor) and each.requires_grad]
