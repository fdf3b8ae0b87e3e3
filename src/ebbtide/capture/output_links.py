"""Which outputs of a step others are computed from, in a way that gradients take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ebbtide.capture.joint import Captured

__all__ = ["Links", "links_of"]

Links = Mapping[int, frozenset[int]]
"""Of every linked output its position among the node's outputs, and the positions of those that it is linked to."""


def links_of(captured: Captured) -> Links:
    """The linked outputs of a step."""
    outputs = captured.outputs[: captured.forward_output_count]
    positions = [i for i, each in enumerate(outputs) if isinstance(each, fx.Node) and _takes_gradients(each)]
    if len(positions) < 2:
        return {}
    reaches: dict[fx.Node, int] = {}  # of a node, as bits, the outputs that it takes part in
    own: dict[fx.Node, int] = {}
    for position in positions:
        own[outputs[position]] = own.get(outputs[position], 0) | 1 << position
    for node in reversed(captured.graph.nodes):
        found = own.get(node, 0)
        for reader in node.users:
            found |= reaches.get(reader, 0)
        if found and _takes_gradients(node):
            reaches[node] = found
    links = {i: reaches.get(outputs[i], 0) & ~(1 << i) for i in positions}
    return {i: frozenset(j for j in positions if bits >> j & 1) for i, bits in links.items() if bits}


def _takes_gradients(node: fx.Node) -> bool:
    """Whether a gradient comes through ``node``, as far as its kind says."""
    value = node.meta.get("val")
    values: Sequence[object] = value if isinstance(value, list | tuple) else [value]
    if node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_copy.default):
        return False
    return any(isinstance(each, torch.Tensor) and (each.is_floating_point() or each.is_complex()) for each in values)
