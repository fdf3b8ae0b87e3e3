"""A joint graph of AOTAutograd's, kept as the stubs of its step run: at each call's sizes, and for other layouts.

AOTAutograd gets stub graphs (``stubs``) and two indirections (``executor``), so what runs may be planned, and planned
anew, at any later time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ebbtide.capture.joint import Captured, accumulating, read_joint
from ebbtide.capture.layouts import Layouts, laid_out
from ebbtide.capture.symbolic.sizes import NotAtTheseSizes, at_sizes, size_inputs
from ebbtide.capture.trace import Taken, capture_settings
from ebbtide.cost.cache import device_context
from ebbtide.engine.executor import run_backward
from ebbtide.engine.stubs import stubs
from ebbtide.errors import CaptureError, InternalError
from ebbtide.signals import signals_wait
from ebbtide.torch_seams.aot import DynamoGraph, boxed

__all__ = ["ALLOCATOR_GRANULARITY_BYTES", "StaleCapture", "TracedGraph"]

# c10's CUDA allocator hands out multiples of 512 bytes (kMinBlockSize); the CPU's reports what was asked for.
ALLOCATOR_GRANULARITY_BYTES = {"cpu": 1, "cuda": 512}


class StaleCapture(CaptureError):
    """The model is not what was captured: an attribute, a mode or a flag that the step depends on has changed."""


class TracedGraph:
    """What of a :class:`~ebbtide.capture.trace.Partitioner` keeps the joint graph.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        name: of the case.
        symbolic: whether sizes may be symbols.

    Attributes:
        is_made: whether the joint graph is at hand.
    """

    def __init__(self, *, device: str, name: str, symbolic: bool = False) -> None:
        self.device = device
        self.symbolic = symbolic
        self._name = name
        self._taken = Taken()
        self._leaves: frozenset[int] | None = None
        """Positions of the inputs whose gradients become ``.grad``; all if it is ``None``."""
        self.forget_graph()

    def forget_graph(self) -> None:
        """Nothing is traced."""
        self.is_made = False
        self._joint: fx.GraphModule | None = None
        self._graph: DynamoGraph | None = None
        self._output_count = 0
        self._captured: Captured | None = None

    def at(self, inputs: Sequence[object]) -> Captured:
        """The step as a value, independent of any plan.

        Args:
            inputs: of the step, flat (:meth:`inputs_of`); of a symbolic capture those count that are numbers.

        Raises:
            NotAtTheseSizes: if the symbolic graph does not say what happens at these sizes.
            CaptureError: if the step cannot be planned.
        """
        assert self._joint is not None
        if not self.symbolic:
            if self._captured is None:
                self._captured = self._read(self._joint)
            return self._captured
        names = [node.name for node in self._joint.graph.find_nodes(op="placeholder")]
        by_name = {names[i]: size for i, size in enumerate(inputs) if isinstance(size, int)}
        with signals_wait(), capture_settings(here=True), self._behind_autocast():
            return self._read(at_sizes(self._joint, by_name, self._taken.conditions))

    def traced_again(self, captured: Captured, layouts: Layouts) -> Captured:
        """``captured``, which is of this capture, where gradients of its outputs arrive in ``layouts``.

        Raises:
            StaleCapture: if a capture of many shapes holds them not, and one of its own has to serve the call.
            CaptureError: if it cannot be planned.
        """
        try:
            again, count = self._traced(captured, layouts)
        except CaptureError as error:
            if not self.symbolic:
                raise
            raise StaleCapture(str(error)) from error
        if count != captured.forward_output_count or len(again.primals) != len(captured.primals):
            raise InternalError("a step traced again has other inputs or outputs")
        return replace(again, parameters=captured.parameters)

    def _traced(self, captured: Captured, layouts: Layouts) -> tuple[Captured, int]:
        assert self._graph is not None
        traced = zip(captured.tangents, layouts, strict=True)
        like = [laid_out(node.meta["val"].shape, strides, symbolic=self.symbolic) for node, strides in traced]
        with signals_wait(), capture_settings(here=True):
            joint, count = self._graph.joint(like)
            if self.symbolic:
                sizes = {node.name: node.meta.get("val") for node in captured.primals}
                with self._behind_autocast():
                    joint = at_sizes(joint, {name: size for name, size in sizes.items() if isinstance(size, int)})
        return self._read(joint), count

    def _behind_autocast(self) -> AbstractContextManager[object]:
        """For calls of a joint graph, which are those that autocast has made: under the user's they were cast again."""
        return torch.autocast(self.device, enabled=False)

    def accumulating(self, captured: Captured, positions: frozenset[int]) -> Captured:
        """``captured`` where these primals have gradients already (``capture.joint``)."""
        return accumulating(captured, positions)

    def _read(self, joint: fx.GraphModule) -> Captured:
        return read_joint(
            joint.graph,
            self._output_count,
            name=self._name,
            granularity_bytes=ALLOCATOR_GRANULARITY_BYTES[self.device],
            context=device_context(self.device),
            leaves=self._leaves,
        )

    # -- the partitioner ------------------------------------------------------------------------------------

    def take_graph(self, graph: DynamoGraph) -> None:
        """Keep it."""
        self._graph = graph

    def partition(self, joint: fx.GraphModule, forward_output_count: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Keep the joint graph; AOTAutograd goes on with stubs."""
        if self.symbolic and not size_inputs(joint.graph):
            raise NotAtTheseSizes("no size of the captured step is left a symbol")
        graphs = stubs(joint, forward_output_count)
        self._joint, self._output_count = joint, forward_output_count
        if not self.symbolic:
            self._captured = self._read(joint)
        self.is_made = True
        return graphs

    def backward_callable(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Runs the backward of the step whose handle comes first."""
        return boxed(run_backward)
