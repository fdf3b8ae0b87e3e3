"""One captured graph of a step: its capture, the graph as a value, and what is seen of the tensors that go in.

A step of several pieces has one for each captured graph; budget, residents and plans are the step's.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence
from dataclasses import replace

import torch

from ebbtide.capture.joint import Captured
from ebbtide.capture.layouts import Layouts
from ebbtide.capture.loss import loss_is_outside
from ebbtide.engine.compiled import Call, Capture
from ebbtide.measurement.leftovers import is_left
from ebbtide.measurement.resident import hidden_in, storages_in

__all__ = ["Piece"]


class Piece:
    """A captured graph of one input signature.

    Args:
        capture: that serves it, of its own or shared with other shapes.

    Attributes:
        captured: the graph as a value; ``None`` before its first call.
        profiled_without_memory: whether its capture had no room to ask kernels how they lay out their results.
        accumulated: primals whose gradients are copied, unless all of the model's parameters have gradients.
        layouts: of the gradients of its outputs, as they arrived last; ``None`` if that was as traced.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.captured: Captured | None = None
        self.profiled_without_memory = False
        self.accumulated: frozenset[int] = frozenset()
        self.layouts: Layouts | None = None
        self._hidden: list[weakref.ref[torch.Tensor]] = []  # inputs that no walk over model and arguments finds
        self._changed_buffers: list[str] = []
        self._changed_others: list[weakref.ref[torch.Tensor]] = []
        self._others: dict[tuple[Layouts | None, bool], Captured] = {}

    def see_inputs(self, inputs: Sequence[object], call: Call, *, whole: bool = True) -> None:
        """Find out what the graph's inputs are: those of ``call``, if it is ``whole``, or else also its own tensors."""
        self._hidden = hidden_in(inputs, call.module, (call.args, call.kwargs)) if whole else []
        assert self.captured is not None
        parameters = {id(each): name for name, each in call.module.named_parameters()}
        self.captured = replace(self.captured, parameters=tuple(parameters.get(id(each), "") for each in inputs))
        names = {id(each): name for name, each in call.module.named_buffers()}
        changed = [
            value for node, value in zip(self.captured.primals, inputs, strict=True) if node in self.captured.mutated
        ]
        self._changed_buffers = [names[id(each)] for each in changed if id(each) in names]
        self._changed_others = [
            weakref.ref(each) for each in changed if isinstance(each, torch.Tensor) and id(each) not in names
        ]
        if copied := self.captured.copied_gradients:
            own = {id(each) for each in call.module.parameters()}
            self.accumulated = frozenset(i for i in copied if id(inputs[i]) in own)

    def changed_in(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """What the step changes: buffers of ``module``, and inputs that are none."""
        others = [reference() for reference in self._changed_others]
        return [*map(module.get_buffer, self._changed_buffers), *(each for each in others if each is not None)]

    def captured_for(self, layouts: Layouts | None, *, accumulating: bool) -> Captured:
        """The graph as traced for ``layouts``, where the model's parameters have gradients already, or have not.

        Raises:
            CaptureError: if it cannot be traced for them.
        """
        assert self.captured is not None
        if accumulating and not self.accumulated:
            accumulating = False
        key = (layouts, accumulating)
        if key in self._others:
            return self._others[key]
        if accumulating:
            found = self.capture.accumulating(self.captured_for(layouts, accumulating=False), self.accumulated)
        elif layouts is not None:
            found = self.capture.traced_again(self.captured, layouts)
        else:
            return self.captured
        return self._others.setdefault(key, found)

    def accumulates(self, captured: Captured) -> bool:
        """Whether ``captured`` is what :meth:`captured_for` gives where gradients are there already."""
        return any(each is captured and accumulating for (_, accumulating), each in self._others.items())

    @property
    def traced_tangents(self) -> tuple[torch.Tensor, ...]:
        """The gradients of its outputs, as they were traced first: fake tensors."""
        assert self.captured is not None
        return tuple(node.meta["val"] for node in self.captured.tangents)

    def learn_layouts(self, layouts: Layouts) -> None:
        """Gradients of its outputs have arrived in ``layouts``: the next step is planned for that."""
        self.layouts = layouts if any(layouts) else None

    @property
    def loss_is_outside(self) -> bool:
        """Whether the graph does not give the loss."""
        return self.captured is not None and loss_is_outside(self.captured)

    @property
    def hidden_inputs(self) -> list[torch.Tensor]:
        """Inputs that live and that no walk over model and arguments finds."""
        return [each for each in (reference() for reference in self._hidden) if each is not None]

    def hidden_bytes(self, reached: Container[int]) -> int:
        """Bytes of these inputs and of their gradients, without what has been ``reached`` by now or counts as left."""
        if not self._hidden:
            return 0
        found = storages_in(self.hidden_inputs)
        return sum(size for key, size in found.items() if key not in reached and not is_left(key))
