"""A schedule becomes two FX graphs in schedule order; FX's generated Python is the executor.

A repeated op is a new node; a free is the last use (the generated code writes ``x = None`` after it), which is a wait
for the copy where the buffer has been offloaded just before; what the backward reads before it makes it again crosses
the boundary as a saved tensor. What is away crosses it in the arena of the step (``transfers.arena``).

Contracts of the two graphs (AOTAutograd's ``partition_fn``): the forward has all primals as placeholders in order and
returns the joint forward outputs, then the saved values; the backward takes the saved values in the same order, then
the tangents, and returns one value per primal. A placeholder's name must equal its target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx.node import Argument

from ebbtide.capture.joint import Captured
from ebbtide.capture.rules.batch_norm import repeat_of, repeated_arguments
from ebbtide.errors import InternalError
from ebbtide.lower.emit import Emitter
from ebbtide.lower.targets import EFFECTS, read_state, replay
from ebbtide.step.machine import Link
from ebbtide.step.program import COPY_BACK
from ebbtide.step.schedule import Boundary, Compute, Free, Offload, Reload, Schedule, kept_outputs
from ebbtide.torch_seams.graphs import uncompiled_module
from ebbtide.transfers.slots import Slot, Space

__all__ = ["STATE_OF", "Lowered", "lower"]

STATE_OF = "ebbtide_state_of"
"""Key in a lowered node's meta: the random op whose generator state the node holds."""


@dataclass(frozen=True)
class Lowered:
    """The two graphs of a schedule.

    Attributes:
        forward: placeholders are the primals; returns the forward outputs, then what is saved.
        backward: placeholders are what is saved, then the tangents; returns one value per primal.
        saved_count: how many values cross the boundary.
        slots: of the buffers that are moved; empty if none is.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved_count: int
    slots: tuple[Slot, ...] = ()


@dataclass
class _Lowering:
    joint: Captured
    schedule: Schedule
    slots: tuple[Slot, ...]
    leaving: set[int] = field(default_factory=set[int])  # offloaded and not freed yet
    runs: list[int] = field(default_factory=list[int])
    states: dict[int, fx.Node] = field(default_factory=dict[int, "fx.Node"])
    saved_states: dict[int, fx.Node] = field(default_factory=dict[int, "fx.Node"])
    saved: list[tuple[fx.Node, fx.Node]] = field(default_factory=list["tuple[fx.Node, fx.Node]"])
    new_values: dict[fx.Node, Argument] = field(default_factory=dict["fx.Node", "Argument"])

    def __post_init__(self) -> None:
        self.total_runs = [0] * len(self.joint.program.ops)
        for op in self.schedule.computes:
            if op is not None:
                self.total_runs[op] += 1
        self.runs = [0] * len(self.joint.program.ops)
        slot_of = {slot.buffer: index for index, slot in enumerate(self.slots)}
        self.forward = Emitter(self.joint, self._never, slot_of=slot_of)
        self.backward = Emitter(self.joint, self._save, slot_of=slot_of)
        self.current = self.forward
        self.inputs_end: fx.Node | None = None

    def _never(self, node: fx.Node) -> fx.Node:
        raise InternalError(f"the forward reads {node}, which it has not made")

    def _save(self, node: fx.Node) -> fx.Node:
        """The backward needs ``node`` from the forward: save it there, take it here."""
        held = self.forward.value(node)
        placeholder = self._saved_placeholder(held)
        self.backward.bind(node, placeholder)
        return placeholder

    def _saved_placeholder(self, node: fx.Node) -> fx.Node:
        graph = self.backward.graph
        with graph.inserting_before(self.inputs_end):
            placeholder = graph.placeholder(f"ebbtide_saved_{len(self.saved)}")
        assert placeholder.name == placeholder.target
        self.saved.append((node, placeholder))
        return placeholder

    def start(self) -> None:
        for index, node in enumerate(self.joint.primals):
            placeholder = self.forward.graph.placeholder(f"ebbtide_input_{index}")
            self.forward.bind(node, placeholder)

    def boundary(self) -> None:
        self.forward.arrive_all()
        self.current = self.backward
        for index, node in enumerate(self.joint.tangents):
            placeholder = self.backward.graph.placeholder(f"ebbtide_tangent_{index}")
            self.backward.bind(node, placeholder)
            self.inputs_end = self.inputs_end or placeholder
        if self.inputs_end is None:
            # No tangents: saved placeholders still have to precede everything else.
            self.inputs_end = self.backward.graph.call_function(len, ((),))

    def offload(self, buffer: int) -> None:
        self.current.offload(buffer)
        self.leaving.add(buffer)

    def free(self, buffer: int) -> None:
        if buffer in self.leaving:
            self.leaving.discard(buffer)
            self.current.settle(buffer)
        self.current.free(buffer)

    def compute(self, index: int, kept: tuple[int, ...]) -> None:
        op = self.joint.program.ops[index]
        if op.target == COPY_BACK:  # what it reads is returned, and may be freed before the forward ends
            returned = self.joint.outputs[: self.joint.forward_output_count]
            read = [out for out in returned if isinstance(out, fx.Node) and self.joint.buffer_of.get(out) in op.inputs]
            self.new_values = {out: self.forward.value(out) for out in read}
        first = self.runs[index] == 0
        self.runs[index] += 1
        if not first:
            # What stays once it is made is there already, in whichever graph made it.
            kept = tuple(b for b in kept if b not in self.joint.program.pinned)
        if op.repeat and not first:
            self.current.run(index, kept, self._repeat)
            return
        if not op.random or self.total_runs[index] == 1:
            self.current.run(index, kept)
            return
        device = self._device_of(index)
        if first:
            state = self.current.graph.call_function(read_state, (device,))
            state.meta[STATE_OF] = index
            state.meta["val"] = None
            self.states[index] = state
            self.current.run(index, kept)
        else:
            self.current.run(index, kept, lambda node: self._replay(index, device, node))

    def _repeat(self, node: fx.Node) -> fx.Node:
        target = repeat_of(node)
        assert target is not None
        return self.current.graph.call_function(target, *self.current.mapped(*repeated_arguments(node)))

    def _replay(self, index: int, device: str, node: fx.Node) -> fx.Node:
        args, kwargs = self.current.mapped(node.args, node.kwargs)
        call = (device, self._state(index), node.target, args, kwargs)
        return self.current.graph.call_function(replay, call)  # type: ignore[arg-type]

    def _state(self, index: int) -> fx.Node:
        held = self.states[index]
        if held.graph is self.current.graph:
            return held
        if index not in self.saved_states:
            placeholder = self._saved_placeholder(held)
            placeholder.meta[STATE_OF] = index
            placeholder.meta["val"] = None
            self.saved_states[index] = placeholder
        return self.saved_states[index]

    def _device_of(self, index: int) -> str:
        value = self.joint.op_nodes[index].meta["val"]
        tensors = value if isinstance(value, list | tuple) else (value,)
        return next(t.device.type for t in tensors if isinstance(t, torch.Tensor))

    def finish(self) -> Lowered:
        count = self.joint.forward_output_count
        gradients = [self._result(self.backward, out) for out in self.joint.outputs[count:]]
        results = [self.new_values.get(out) or self._result(self.forward, out) for out in self.joint.outputs[:count]]
        self.backward.graph.output(tuple(gradients))
        self.forward.graph.output((*results, *(held for held, _ in self.saved)))
        constants = self.joint.graph.owning_module
        forward, backward = (_module(emitter.graph, constants) for emitter in (self.forward, self.backward))
        return Lowered(forward, backward, len(self.saved), self.slots)

    def _result(self, emitter: Emitter, out: Argument) -> Argument:
        return emitter.value(out) if isinstance(out, fx.Node) else out


def _module(graph: fx.Graph, constants: torch.nn.Module | None) -> fx.GraphModule:
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and node.target not in EFFECTS:
            # Elements that nobody reads: erased, they die right after their op.
            if node.meta.get("val") is None or _is_element(node):
                graph.erase_node(node)
    root = torch.nn.Module()
    for node in graph.find_nodes(op="get_attr"):
        setattr(root, node.target, getattr(constants, node.target))
    graph.lint()
    return uncompiled_module(root, graph)


def _is_element(node: fx.Node) -> bool:
    return (
        bool(node.args) and isinstance(node.args[0], fx.Node) and isinstance(node.args[0].meta.get("val"), list | tuple)
    )


def lower(joint: Captured, schedule: Schedule, links: Mapping[str, Link] | None = None) -> Lowered:
    """The two graphs of ``schedule``, which must be legal for ``joint.program``.

    The result is checked by ``proof.prove``, not here.

    Args:
        joint: the step.
        schedule: for it.
        links: to the tiers that the schedule moves buffers to, for their alignment.
    """
    lowering = _Lowering(joint, schedule, _slots(joint, schedule, links or {}))
    lowering.start()
    for action, kept in zip(schedule.actions, kept_outputs(joint.program, schedule), strict=True):
        match action:
            case Compute(op):
                lowering.compute(op, kept)
            case Free(buffer):
                lowering.free(buffer)
            case Offload(buffer, _):
                lowering.offload(buffer)
            case Reload(buffer):
                lowering.current.reload(buffer)
            case Boundary():
                lowering.boundary()
    return lowering.finish()


def _slots(joint: Captured, schedule: Schedule, links: Mapping[str, Link]) -> tuple[Slot, ...]:
    """A slot per buffer that is offloaded, in the order in which they leave."""
    space = Space(links)
    found: list[Slot] = []
    for action in schedule.actions:
        if isinstance(action, Offload):
            base = joint.base_nodes[action.buffer]
            if base is None:
                raise InternalError(f"{action!r} moves a buffer that nobody reads")
            value = base.meta["val"]
            size = value.numel() * value.element_size()
            found.append(
                Slot(
                    buffer=action.buffer,
                    name=joint.program.buffers[action.buffer].name,
                    tier=action.tier,
                    offset=space.take(action.tier, joint.program.buffers[action.buffer].bytes),
                    bytes=size,
                    shape=tuple(value.shape),
                    stride=tuple(value.stride()),
                    dtype=value.dtype,
                    device=value.device,
                )
            )
    return tuple(found)
