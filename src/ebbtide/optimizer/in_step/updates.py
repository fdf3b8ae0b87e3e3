"""A captured step in which parameters are updated as soon as their gradients are there, as a captured step.

1. A gradient that the step returned is read by an *update* instead, an op without a result that runs once. It dies
   there.
2. The update changes a parameter, so it comes behind whatever reads it, or may yet: behind each op that reads the
   parameter, and behind each that reads something which, if it was dropped, is made again through such an op. Autograd
   makes a gradient where all that the parameter went into has been walked back through, so both are right there in
   nearly every step; where they are not (what is detached and used later), the update waits. So it does for the
   total norm, where something has to be known of all gradients first (``optimizer.in_step.norm_ops``).
3. Ops of the backward that read an updated parameter do not run again, nor do those that make a gradient which is
   applied: what they give is kept until its last reader. Without that, all of the backward would hang on every
   parameter behind it, and no update could come before its end, nor one of two whose gradients are made of the same.
4. Optimizers may write to a gradient (Nesterov's momentum does, on lists of tensors), so nobody else may read it: of
   one that others read the update takes a copy, which is made where the gradient is.
5. So no schedule with first runs in captured order can need what an update has changed, whatever it drops. Planners
   need to know nothing of updates; ``legality`` and the proof of the lowered graphs ask all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ebbtide.capture.joint import Captured, reread
from ebbtide.cost.priced import Priced
from ebbtide.optimizer.in_step.norm_ops import own_copy, total_norm_of
from ebbtide.optimizer.in_step.updater import current_updater
from ebbtide.torch_seams.aot import is_tangent
from ebbtide.torch_seams.fake_tensors import mode_of
from ebbtide.torch_seams.storages import storage_key
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["PREFIX", "Update", "updatable", "updates_in", "with_updates"]

PREFIX = "ebbtide.update."
"""Begins the target of an update; the class of the optimizer follows."""


@dataclass(frozen=True)
class Update(Priced):
    """The target of an update. Its arguments are the gradient and two numbers of bytes (``cost.priced``).

    Between them stands the total norm, where the step has one (``optimizer.in_step.norm_ops``).

    Attributes:
        position: of the parameter among the primals.
        parameter: its name.
        optimizer: class of the optimizer.
    """

    position: int
    parameter: str
    optimizer: str

    @property
    def __name__(self) -> str:
        """What generated code calls it."""
        return f"update_{self.position}"

    def __str__(self) -> str:
        return f"{PREFIX}{self.optimizer}"  # the same for all: ops that cost the same have one signature

    def __call__(self, gradient: torch.Tensor, *others: torch.Tensor | int) -> torch.Tensor:
        """Let the updater that is current take it."""
        current_updater().update(self.position, gradient)
        return _NOTHING


_NOTHING = torch.empty(0)


def updates_in(captured: Captured) -> dict[fx.Node, Update]:
    """The updates of a step, by node."""
    return {node: node.target for node in captured.op_nodes if isinstance(node.target, Update)}


def updatable(captured: Captured) -> dict[int, str]:
    """The parameters that may be updated in the step: by position among the primals, their names.

    Those that get a gradient made of the step's own, and that the step does not change itself.
    """
    late = _late(captured)
    gradients = captured.outputs[captured.forward_output_count :]
    found: dict[int, str] = {}
    for position, (primal, gradient) in enumerate(zip(captured.primals, gradients, strict=True)):
        name = captured.parameters[position] if captured.parameters else ""
        if name and isinstance(gradient, fx.Node) and gradient in late and primal not in captured.mutated:
            if captured.buffer_of.get(gradient) is not None and not is_tangent(gradient):
                found[position] = name
    return found


def with_updates(captured: Captured, updates: Mapping[Update, tuple[int, int]]) -> Captured:
    """``captured`` with ``updates`` in the place of the gradients that they apply (definition 1).

    Args:
        captured: left as it is.
        updates: with the bytes that each takes and moves.
    """
    graph = fx.Graph(owning_module=captured.graph.owning_module)
    nodes: dict[fx.Node, fx.Node] = {}
    results = list(tree_leaves(graph.graph_copy(captured.graph, nodes)))
    count = captured.forward_output_count
    total = total_norm_of(captured)
    waits = () if total is None else (nodes[total],)
    after = _places(captured, [each.position for each in updates])
    place = {node: index for index, node in enumerate(captured.graph.nodes)}
    anchors: dict[fx.Node, fx.Node] = {}
    # Those of one place in the order in which their gradients are made.
    in_order = sorted(updates, key=lambda each: place[captured.outputs[count + each.position]])
    for update in in_order:
        gradient, made = results[count + update.position], captured.outputs[count + update.position]
        if total is None:  # else norms have seen to it
            gradient = own_copy(captured, made, gradient)
            anchors.setdefault(made, gradient)
        results[count + update.position] = None
        original = after[update.position]
        with graph.inserting_after(anchors.get(original, nodes[original])):
            name = f"update_{update.parameter.replace('.', '_')}"
            node = graph.create_node("call_function", update, (gradient, *waits, *updates[update]), name=name)
        anchors[original] = node
        node.meta = dict(gradient.meta)
        with mode_of(gradient.meta["val"]):
            node.meta["val"] = gradient.meta["val"].new_empty(0)
    graph.output(tuple(results)).meta = dict(captured.graph.output_node().meta)
    return _until_updates(reread(captured, graph))


def _late(captured: Captured) -> set[fx.Node]:
    """All that depends on a tangent."""
    late = set(captured.tangents)
    for node in captured.graph.nodes:
        if node.op == "call_function" and not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late


def _reads(captured: Captured, positions: Mapping[int, int]) -> list[int]:
    """Per op, which storages it reads itself: the bits of ``positions``, by key of the storage."""
    found: list[int] = []
    for node in captured.op_nodes:
        bits = 0
        for source in node.all_input_nodes:
            value = source.meta.get("val")
            if isinstance(value, torch.Tensor) and captured.buffer_of.get(source, 0) is None:
                bits |= positions.get(storage_key(value), 0)
        found.append(bits)
    return found


def _places(captured: Captured, positions: list[int]) -> dict[int, fx.Node]:
    """Per primal, the node behind which it is updated (definition 2)."""
    program, primals = captured.program, captured.primals
    keys = {position: storage_key(primals[position].meta["val"]) for position in positions}
    bit_of = {key: 1 << index for index, key in enumerate(dict.fromkeys(keys.values()))}
    reads = _reads(captured, bit_of)
    once = _once(captured, reads, [captured.outputs[captured.forward_output_count + each] for each in positions])
    needs: list[int] = []  # what an op reads, and what it takes to make again what it reads
    last: dict[int, int] = {}
    for index, op in enumerate(program.ops):
        needed = reads[index]
        for buffer in op.inputs:
            producer = program.buffers[buffer].producer
            if producer is not None and producer not in once:
                needed |= needs[producer]
        needs.append(needed)
        while needed:
            bit = needed & -needed
            last[bit] = index
            needed ^= bit
    order = {node: index for index, node in enumerate(captured.graph.nodes)}
    total = total_norm_of(captured)
    found: dict[int, fx.Node] = {}
    for position in positions:
        gradient = captured.outputs[captured.forward_output_count + position]
        index = last.get(bit_of[keys[position]])
        reader = gradient if index is None else captured.op_nodes[index]
        found[position] = max(gradient, reader, total or gradient, key=order.__getitem__)
    return found


def _once(captured: Captured, reads: Sequence[int], gradients: Iterable[Any]) -> set[int]:
    """Ops that do not run again, where ``gradients`` are applied (definition 3)."""
    program = captured.program
    found = {i for i, op in enumerate(program.ops) if not op.rerunnable or (reads[i] and program.after_boundary[i])}
    for gradient in gradients:
        buffer = captured.buffer_of[gradient]
        producer = None if buffer is None else program.buffers[buffer].producer
        if producer is not None:
            found.add(producer)
    return found


def _until_updates(captured: Captured) -> Captured:
    """``captured``, which has updates, with what may not run again after them, or at all (definition 3)."""
    program, primals = captured.program, captured.primals
    at = {node: index for index, node in enumerate(captured.op_nodes)}
    keys: dict[int, list[int]] = {}
    for node, update in updates_in(captured).items():
        keys.setdefault(storage_key(primals[update.position].meta["val"]), []).append(at[node])
    order = list(keys)
    reads = _reads(captured, {key: 1 << index for index, key in enumerate(order)})
    ops = list(program.ops)
    for index in _once(captured, reads, [node.args[0] for node in updates_in(captured)]):
        ops[index] = replace(ops[index], rerunnable=False)
    for index, bits in enumerate(reads):
        if bits:
            until = sorted(u for i, key in enumerate(order) if bits >> i & 1 for u in keys[key])
            ops[index] = replace(ops[index], until=tuple(until))
    return replace(captured, program=replace(program, ops=tuple(ops)))


def names_of(updates: Any) -> str:
    """Names of parameters, for people: the first few of many."""
    names = list(updates)
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
