"""Calls that run as they are written, since a gradient inside of them frees the graph of what they return.

Force fields take ``torch.autograd.grad(energy, positions, create_graph=self.training)`` in their forward. In training
mode that is part of the step. In eval mode it frees the graph behind the energy, so that a backward from there raises
in eager, and there is nothing to train: the call runs as it is, as one without gradients does. Which calls are such is
kept per kind, whatever their sizes; what they return is looked at each time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ebbtide.engine.call_context import CallContext
from ebbtide.engine.compiled import Call
from ebbtide.engine.key import part_of, structure_of
from ebbtide.errors import CaptureError
from ebbtide.torch_seams.autograd import is_freed
from ebbtide.torch_seams.trees import tree_flatten

__all__ = ["GRAPH_FREED", "FreedGraphs"]

GRAPH_FREED = "nothing to train: a gradient inside of the forward has freed its graph"
"""Why such a call is not planned."""


class FreedGraphs:
    """Such calls of one fitted model."""

    def __init__(self) -> None:
        self._refusals: dict[object, CaptureError] = {}

    def refusal_of(self, call: Call, now: CallContext) -> CaptureError | None:
        """Why calls of this kind are no graph; ``None`` if they may be."""
        return self._refusals.get(_kind_of(call, now)) if self._refusals else None

    def note(self, call: Call, now: CallContext, returned: Iterable[torch.Tensor], refusal: CaptureError) -> None:
        """Note what a call like this has ``returned`` that was no graph for the reason of ``refusal``.

        Raises:
            CaptureError: ``refusal``, if something of it could be trained.
        """
        if any(each.requires_grad and not is_freed(each) for each in returned):
            raise refusal
        refusal.__cause__ = refusal.__context__ = None  # whose frames hold what the capture made
        self._refusals[_kind_of(call, now)] = refusal.with_traceback(None)


def _kind_of(call: Call, now: CallContext) -> object:
    leaves, spec = tree_flatten((call.args, call.kwargs))
    return (now.modes, structure_of(spec), tuple(part_of(each, _without_sizes) for each in leaves))


def _without_sizes(tensor: torch.Tensor) -> object:
    return (tensor.dtype, tensor.device, tensor.requires_grad)
