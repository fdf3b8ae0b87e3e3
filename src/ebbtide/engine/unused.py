"""Gradients of parameters that no used output depends on: ``None``, as in eager.

AOTAutograd's node gets zeros for an output of which user code has used nothing, and the captured backward computes
with them. Zeros and no gradient are not the same to an optimizer: weight decay and momentum move the one and not the
other. So before the node runs it is noted which of its gradients have arrived, and those that the backward has made
of the others alone are dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.optimizer.in_step.updates import updates_in
from ebbtide.torch_seams.aot import output_position_of

__all__ = ["UnusedOutputs", "note_arrived"]


class _Arrived(threading.local):
    missing: frozenset[int] = frozenset()


_arrived = _Arrived()


def note_arrived(gradients: tuple[torch.Tensor | None, ...]) -> None:
    """A prehook of a step's node, which runs next on this thread."""
    _arrived.missing = frozenset(index for index, each in enumerate(gradients) if each is None)


class UnusedOutputs:
    """Which gradients depend on which outputs of a captured step."""

    def __init__(self, captured: Captured) -> None:
        tangents = captured.tangents
        self._sources: tuple[frozenset[int], ...] = ()
        if len(tangents) < 2:  # a backward of a single output that nobody used never comes
            return
        # A tangent whose output is not known counts as one that always arrives.
        places = [output_position_of(node, captured.graph, captured.forward_output_count) for node in tangents]
        reached: dict[fx.Node, frozenset[int]] = {
            node: frozenset([-1 if place is None else place]) for node, place in zip(tangents, places, strict=True)
        }
        nothing: frozenset[int] = frozenset()
        for node in captured.graph.nodes:
            if node.op == "call_function":
                found = {reached.get(each, nothing) for each in node.all_input_nodes}
                reached[node] = next(iter(found)) if len(found) == 1 else nothing.union(*found)
        gradients = list(captured.outputs[captured.forward_output_count :])
        for node, update in updates_in(captured).items():
            gradients[update.position] = node.args[0]
        self._sources = tuple(
            reached.get(each, nothing) if isinstance(each, fx.Node) else nothing for each in gradients
        )

    def left_out(self) -> frozenset[int]:
        """Positions of the primals of which :meth:`dropped` will say that they have no gradient."""
        missing = _arrived.missing
        if not missing:
            return frozenset()
        return frozenset(i for i, sources in enumerate(self._sources) if sources and sources <= missing)

    def dropped(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """``gradients`` of the backward that runs, ``None`` where all that they depend on did not arrive."""
        missing, _arrived.missing = _arrived.missing, frozenset()
        if not missing or not self._sources:
            return gradients
        return [
            None if sources and sources <= missing else each
            for each, sources in zip(gradients, self._sources, strict=True)
        ]
