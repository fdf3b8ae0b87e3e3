"""One capture with symbolic sizes that serves many shapes: each has its own program, plan and generated graphs.

1. The joint graph is captured once, with the sizes that change as symbols. At the first call of each shape it is
   written out at that shape's sizes (``symbolic.sizes``), and from there on all is as for a capture of its own: read,
   planned, lowered, proven and verified, with nothing symbolic left.
2. What torch guards are the conditions under which the symbolic graph is the step. A shape that breaks one has a
   capture of its own; so has one at which the graph cannot be written out.
3. Forwards and backwards of different shapes may interleave: a forward saves its step beside its tensors, in the
   place of a size, and the backward finds it there. A step lives as long as a backward may come to it, though its
   shape be planned anew or forgotten meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ebbflow.capture.symbolic.sizes import NotAtTheseSizes, at_sizes, size_inputs
from ebbflow.capture.trace import capture_settings, compile_step, forget_step
from ebbflow.engine.step import PlannedStep, boxed

__all__ = ["SharedCapture"]

_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")  # what maybe_mark_dynamic leaves on a tensor


class _Saved(int):
    """A step in the place of a size: autograd's node keeps it as it keeps a size, until the node ends."""

    step: PlannedStep

    @classmethod
    def of(cls, step: PlannedStep) -> _Saved:
        saved = cls(2)
        saved.step = step
        return saved


class SharedCapture:
    """A symbolic capture of one model; the :class:`~ebbflow.capture.trace.Partitioner` of its own capture.

    Args:
        changing: per tensor argument, in the order of ``pytree``, the dimensions that are symbols.
    """

    def __init__(self, changing: Sequence[tuple[int, ...]]) -> None:
        self._changing = changing
        self._compiled = compile_step(self, symbolic=True)
        self._joint: fx.GraphModule | None = None
        self._forward_output_count = 0
        self._current: PlannedStep | None = None
        self.captured = False
        weakref.finalize(self, forget_step, self._compiled).atexit = False

    def running(self, step: PlannedStep) -> Callable[..., Any]:
        """The compiled function as ``step`` runs it; the first call captures, for whichever step makes it."""

        def run(module: Any, forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], every: bool) -> Any:
            self._current = step
            try:
                if self.captured:
                    return self._compiled(module, forward, args, kwargs, every)
                with self._marked((args, kwargs)):
                    return self._compiled(module, forward, args, kwargs, every)
            finally:
                self._current = None

        return run

    @contextmanager
    def _marked(self, call: Any) -> Iterator[None]:
        """While open, Dynamo takes the changing dimensions of a call's tensors as symbols."""
        tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
        ours = [(tensor, mark) for tensor in tensors for mark in _MARKS if not hasattr(tensor, mark)]
        for tensor, dimensions in zip(tensors, self._changing, strict=True):
            for dimension in dimensions:
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        try:
            yield
        finally:
            for tensor, mark in ours:
                if hasattr(tensor, mark):
                    delattr(tensor, mark)

    # -- the partitioner ------------------------------------------------------------------------------------

    def partition(self, joint: fx.GraphModule, forward_output_count: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Keep the symbolic joint graph; give AOTAutograd the two graphs of the shape at hand."""
        symbols = size_inputs(joint.graph)
        if not symbols:
            raise NotAtTheseSizes("no size of the captured step is left a symbol")
        assert self._current is not None
        self._joint, self._forward_output_count = joint, forward_output_count
        hints = {node.name: int(node.meta["val"].node.hint) for node in symbols}
        forward, backward = self._written(self._current, hints)
        primals = [n for n in joint.graph.find_nodes(op="placeholder")]
        return _with_step(forward, backward, primals.index(symbols[0]), symbols[0].meta["val"])

    def forward_callable(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Runs the forward of the current step."""
        return boxed(self._forward)

    def backward_callable(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Runs the backward of the step that comes first."""
        return boxed(self._backward)

    def _written(self, step: PlannedStep, sizes: Mapping[str, int]) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan and lower ``step`` at these sizes."""
        assert self._joint is not None
        return step.partition(at_sizes(self._joint, sizes), self._forward_output_count)

    # -- a step ---------------------------------------------------------------------------------------------

    def _forward(self, args: list[Any]) -> Any:
        step = self._current
        assert step is not None
        assert self._joint is not None
        if step.plan is None:
            names = [node.name for node in self._joint.graph.find_nodes(op="placeholder")]
            sizes = {name: value for name, value in zip(names, args, strict=False) if isinstance(value, int)}
            with capture_settings(here=True):
                self._written(step, sizes)
        return (*step.run_forward(args), _Saved.of(step))

    def _backward(self, args: list[Any]) -> Any:
        saved: _Saved = args.pop(0)
        return saved.step.run_backward(args)


def _with_step(
    forward: fx.GraphModule, backward: fx.GraphModule, size_input: int, size: torch.SymInt
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Copies of the two graphs in which a size is saved as well: the place of the step (definition 3)."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    returned = graph.graph_copy(forward.graph, copies)
    place = [n for n in graph.nodes if n.op == "placeholder"][size_input]
    place.meta["val"] = size
    graph.output((*returned, place))  # type: ignore[misc]
    late = fx.Graph()
    late.placeholder("ebbflow_step").meta["val"] = size
    late.output(late.graph_copy(backward.graph, {}))
    return fx.GraphModule(forward, graph), fx.GraphModule(backward, late)
