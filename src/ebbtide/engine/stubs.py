"""The two graphs that AOTAutograd is given in place of a step's: they say what goes in and out, and are never run.

1. AOTAutograd's runtime does not fix how many values a forward saves: everything after its outputs is saved, and the
   backward gets what was saved, then the tangents (an open slice, torch 2.11 to 2.13). So both compiled functions can
   be indirections that run whatever graphs are current, and each plan may save as many tensors as it likes.
2. What AOTAutograd reads off the graphs: the forward's placeholders are the primals, its outputs the forward outputs
   alone; the backward takes the tangents and returns one value per primal, ``None`` exactly where the joint graph
   has none (it detaches those inputs).
3. The stub forward saves nothing, so nothing is donated either, and ``retain_graph`` works with donation on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ebbtide.torch_seams.aot import is_tangent
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["stubs"]


def _never_run() -> Any:
    raise AssertionError("a stub graph was run")


def stubs(joint: fx.GraphModule, forward_output_count: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward stub of a joint graph (definition 2)."""
    placeholders: list[fx.Node] = list(joint.graph.find_nodes(op="placeholder"))
    outputs = tree_leaves(next(iter(joint.graph.find_nodes(op="output"))).args)
    primals = [node for node in placeholders if not is_tangent(node)]
    tangents = [node for node in placeholders if is_tangent(node)]
    return (
        _stub(primals, outputs[:forward_output_count]),
        _stub(tangents, outputs[forward_output_count:]),
    )


def _stub(inputs: Sequence[fx.Node], outputs: Sequence[Any]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(str(node.target))
        copies[node].meta = dict(node.meta)

    def copy(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if value not in copies:
            copies[value] = graph.call_function(_never_run)
            copies[value].meta = dict(value.meta)
        return copies[value]

    graph.output(tuple(copy(value) for value in outputs))
    return fx.GraphModule({}, graph)
