"""A captured graph as a piece of a step (``step.pieces``): which ops read what other parts give, and what goes back."""

from __future__ import annotations

from collections.abc import Collection

import torch.fx as fx

from ebbtide.capture.joint import Captured
from ebbtide.step.pieces import Input, Output, Piece
from ebbtide.torch_seams.aot import mutated_inputs, output_position_of

__all__ = ["piece_of"]


def piece_of(captured: Captured, given: Collection[int]) -> Piece:
    """``captured`` as a piece whose primals at the positions ``given`` are other parts' outputs.

    Its inputs are in the order of these positions, its outputs in that of the forward's, without new values of inputs.
    An output that is a view of an input is none of its buffers.
    """
    backward = captured.outputs[captured.forward_output_count :]
    primals = captured.primals
    positions = sorted(given)
    inputs = tuple(
        Input(_readers(captured, primals[position]), _buffer(captured, backward[position])) for position in positions
    )
    others = [_buffer(captured, node) for position, node in enumerate(backward) if position not in given]
    tangents: dict[int | None, int] = {}
    unpaired: list[Output] = []
    for node, buffer in zip(captured.tangents, captured.program.tangents, strict=True):
        position = output_position_of(node, captured.graph, captured.forward_output_count)
        if position is None or position in tangents:
            unpaired.append(Output(-1, buffer))
        else:
            tangents[position] = buffer
    returned = frozenset(captured.returned)
    changed = mutated_inputs(captured.graph, captured.forward_output_count)
    outputs: list[Output] = []
    for position, node in enumerate(captured.outputs[: captured.forward_output_count]):
        if position in changed:
            if position in tangents:
                unpaired.append(Output(-1, tangents[position]))
            continue
        made = _buffer(captured, node)
        outputs.append(Output(made if made is not None and made in returned else -1, tangents.get(position)))
    weights = tuple(dict.fromkeys(each for each in others if each is not None))
    return Piece(captured.program, inputs, (*outputs, *unpaired), weights)


def _buffer(captured: Captured, node: object) -> int | None:
    return captured.buffer_of.get(node) if isinstance(node, fx.Node) else None


def _readers(captured: Captured, primal: fx.Node) -> tuple[int, ...]:
    """Ops that read ``primal``, itself or through views."""
    seen = {primal}
    for node in captured.graph.nodes:
        if captured.buffer_of.get(node, -1) is None and not seen.isdisjoint(node.all_input_nodes):
            seen.add(node)
    return tuple(op for op, node in enumerate(captured.op_nodes) if not seen.isdisjoint(node.all_input_nodes))
