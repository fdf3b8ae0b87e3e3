"""Copies of gradients that autograd would make behind the step's back, as ops of the step.

A gradient that arrives at a leaf becomes its ``.grad`` as it is, or is copied first (``AccumulateGrad``,
``torch/csrc/autograd/functions/accumulate_grad.h``, 2.11 to 2.13). It is copied if

1. it is not laid out as its parameter: other strides in a dimension of more than one element, or not contiguous where
   the parameter is not dense (``obeys_layout_contract``); an expanded gradient never is;
2. somebody else has it too: another parameter has the same one, or it is a tangent, an input or an output of the step,
   as a backward that user code wrote may return them.

The copies come after the backward graph has returned, outside of every plan. Made here, where each gradient is made,
they have the same bits, they are planned and measured, and what they were copied from can go.

A gradient that arrives where there is one already is added to it in place, and never copied: while gradients are
accumulated the step is the one without these copies (:func:`uncopied`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import fx

from ebbtide.torch_seams.aot import is_tangent
from ebbtide.torch_seams.fake_tensors import mode_of
from ebbtide.torch_seams.storages import storage_key
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["copy_gradients", "copy_positions", "uncopied"]

_aten = torch.ops.aten
_ORIGINAL = "ebbtide_gradient"  # in the meta of a copy: the name of the gradient's node


def copy_gradients(graph: fx.Graph, forward_output_count: int, leaves: Collection[int] | None = None) -> None:
    """Let ``graph`` return gradients that become ``.grad`` as they are: of all primals, or of those at ``leaves``."""
    (output,) = graph.find_nodes(op="output")
    results = tree_leaves(output.args)
    placeholders = list(graph.find_nodes(op="placeholder"))
    primals = [node for node in placeholders if not is_tangent(node)]
    others = [*placeholders, *(each for each in results[:forward_output_count] if isinstance(each, fx.Node))]
    taken = [node.meta["val"] for node in others if isinstance(node.meta.get("val"), torch.Tensor)]
    for position, primal in enumerate(primals, forward_output_count):
        gradient = results[position]
        if not isinstance(gradient, fx.Node) or not isinstance(gradient.meta.get("val"), torch.Tensor):
            continue
        if leaves is not None and position - forward_output_count not in leaves:
            continue
        value, like = gradient.meta["val"], primal.meta["val"]
        if value.is_conj() or value.is_neg() or value.shape != like.shape:
            continue
        if not _laid_out_as(value, like) or any(_overlap(value, other) for other in taken):
            copy = _copy(graph, gradient, like)
            copy.meta[_ORIGINAL] = gradient.name
            results[position] = gradient = copy
        taken.append(gradient.meta["val"])
    output.args = (tuple(results),)


def copy_positions(results: Sequence[object], forward_output_count: int) -> frozenset[int]:
    """The primals of which :func:`copy_gradients` has the gradients copied."""
    gradients = results[forward_output_count:]
    return frozenset(i for i, each in enumerate(gradients) if isinstance(each, fx.Node) and _ORIGINAL in each.meta)


def uncopied(graph: fx.Graph, forward_output_count: int, positions: Iterable[int]) -> fx.Graph:
    """A copy of ``graph`` that returns the gradients of these primals as they are made."""
    bare = fx.Graph(owning_module=graph.owning_module)
    nodes: dict[fx.Node, fx.Node] = {}
    results = tree_leaves(bare.graph_copy(graph, nodes))
    by_name = {old.name: new for old, new in nodes.items()}
    for position in positions:
        results[forward_output_count + position] = by_name[results[forward_output_count + position].meta[_ORIGINAL]]
    bare.output((tuple(results),)).meta = dict(graph.output_node().meta)
    return bare


def _laid_out_as(value: torch.Tensor, like: torch.Tensor) -> bool:
    """Clause 1: torch's ``obeys_layout_contract``."""
    if not _is_dense(like):
        return value.is_contiguous()
    pairs = zip(value.shape, value.stride(), like.stride(), strict=True)
    return all(mine == theirs for size, mine, theirs in pairs if size != 1)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a range of memory, each place once."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda each: each[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have memory in common."""
    if storage_key(one) != storage_key(other):
        return False
    (begin, end), (other_begin, other_end) = _range(one), _range(other)
    return begin < other_end and other_begin < end


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """First element and one past the last."""
    begin = int(tensor.storage_offset())
    reach = int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))
    return begin, begin if tensor.numel() == 0 else begin + reach + 1


def _copy(graph: fx.Graph, gradient: fx.Node, like: torch.Tensor) -> fx.Node:
    """A copy of ``gradient`` laid out as ``like``, right behind it: torch's ``clone_obey_contract``."""
    value = gradient.meta["val"]
    order = sorted(range(value.dim()), key=lambda d: (-like.stride(d), d)) if _is_dense(like) else []
    back = [order.index(d) for d in range(len(order))]
    at = gradient
    if order != sorted(order):
        at = _issue(graph, at, gradient, _aten.permute.default, (order,))
    at = _issue(graph, at, gradient, _aten.clone.default, (), memory_format=torch.contiguous_format)
    if order != sorted(order):
        at = _issue(graph, at, gradient, _aten.permute.default, (back,))
    return at


def _issue(
    graph: fx.Graph,
    after: fx.Node,
    origin: fx.Node,
    target: Callable[..., torch.Tensor],
    arguments: Sequence[object],
    **options: object,
) -> fx.Node:
    # Tangents are listed before the forward's ops, which may not come after one that reads a tangent.
    at_end = after.op == "placeholder"
    with graph.inserting_before(graph.output_node()) if at_end else graph.inserting_after(after):
        node = graph.call_function(target, (after, *arguments), options)  # type: ignore[arg-type]
    node.meta = dict(origin.meta)
    with mode_of(origin.meta["val"]), torch.no_grad():
        node.meta["val"] = target(after.meta["val"], *arguments, **options)
    return node
