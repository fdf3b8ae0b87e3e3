"""What a captured step tells about the code around it."""

from __future__ import annotations

from ebbflow.capture.joint import Captured

__all__ = ["loss_is_outside"]


def loss_is_outside(joint: Captured) -> bool:
    """Whether an output that takes a gradient is no scalar, so that user code computes the loss from it."""
    return any(node.meta["val"].numel() != 1 for node in joint.tangents)
