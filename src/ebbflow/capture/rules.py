"""What a captured step must be for its budget to mean something; anything else is refused by name."""

from __future__ import annotations

from ebbflow.capture.joint import Joint
from ebbflow.errors import CaptureError

__all__ = ["refuse_outside_loss"]


def refuse_outside_loss(joint: Joint) -> None:
    """What user code allocates between the two graphs is not seen: the forward has to end in the loss.

    Raises:
        CaptureError: if the forward returns anything but scalars that takes a gradient.
    """
    for node in joint.tangents:
        value = node.meta["val"]
        if value.numel() != 1:
            raise CaptureError(
                f"the forward returns a tensor of shape {tuple(value.shape)} that takes a gradient, so the loss is "
                "computed outside the model, where its memory is not planned. Return the scalar loss from forward "
                "(a small wrapper module will do), and .detach() whatever else is returned"
            )
