"""Which output of a forward is the loss, decided here alone, and what that means for the other outputs.

A forward that returns ``(loss, logits)`` makes autograd pass a gradient of zeros for the logits, as large as they
are, unless somebody computes with them. So one decides by the role of the outputs:
1. A *loss* is an output of one element that takes a gradient and
   a. is called ``loss``, as a mapping's key or a named tuple's field; or
   b. has no dimensions, is at a place without a name or under one that speaks of a loss (:data:`_SPEAKS_OF_A_LOSS`),
      and is computed from every larger output and from no parameter besides, or reads an argument of the call, labels
      say, that no larger output reads. What a value head makes of a batch of one and the scale of CLIP's logits do
      neither: they are no losses.
2. Where there is a loss, every larger output is detached inside the captured step. What the caller gets in its place
   requires a gradient as before, and raises if one arrives (:func:`guarded`). Other outputs of one element keep theirs,
   and a parameter or an argument of the call that is handed through stays what it is.
3. Where there is none, all outputs take gradients: right in any case, at the price of their size.
4. The loss is *outside* if a larger output takes a gradient: user code computes it from that (:func:`loss_is_outside`).

Names are known while Dynamo traces the outputs (:func:`loss_only`), what is computed from what once its graph is
whole (:func:`settle_roles`); until then :func:`_beside` stands where an output may be detached.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.errors import CaptureError
from ebbtide.torch_seams import trees as pytree
from ebbtide.torch_seams.dynamo import is_argument

__all__ = ["guarded", "loss_is_outside", "loss_only", "marks_in_graphs", "settle_roles"]

_SPEAKS_OF_A_LOSS = ("loss", "nll", "objective", "cost", "elbo")


# -- while Dynamo traces ------------------------------------------------------------------------------------------


def loss_only(outputs: Any) -> tuple[Any, list[torch.Tensor]]:
    """``outputs`` with what may be detached marked, and a list of that; Dynamo traces this."""
    leaves: list[tuple[str | None, torch.Tensor]] = []
    _name_leaves(outputs, None, leaves)
    single = [(name, leaf) for name, leaf in leaves if leaf.requires_grad and leaf.numel() == 1]
    named = any(name == "loss" for name, _ in single)
    candidates = [leaf for name, leaf in single if leaf.dim() == 0 and _may_be_a_loss(name)]
    if not named and not candidates:
        return outputs, []
    marked: list[torch.Tensor] = []
    return _mark(outputs, named, candidates, marked), marked


def _may_be_a_loss(name: str | None) -> bool:
    return name is None or any(word in name.lower() for word in _SPEAKS_OF_A_LOSS)


def _name_leaves(value: Any, name: str | None, leaves: list[tuple[str | None, torch.Tensor]]) -> None:
    if isinstance(value, torch.Tensor):
        leaves.append((name, value))
    elif isinstance(value, dict):
        for key, each in value.items():
            _name_leaves(each, key if isinstance(key, str) else name, leaves)
    elif isinstance(value, tuple) and hasattr(type(value), "_fields"):
        for key in getattr(value, "_fields", ()):
            _name_leaves(getattr(value, key), key, leaves)
    elif type(value) is tuple or type(value) is list:  # others are the user's, and stay what they are
        for each in value:
            _name_leaves(each, name, leaves)


def _mark(value: Any, named: bool, candidates: list[torch.Tensor], marked: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.requires_grad or value.numel() == 1:
            return value
        value = _beside(value, named, candidates)
        marked.append(value)
        return value
    if isinstance(value, dict):
        items = {key: _mark(each, named, candidates, marked) for key, each in value.items()}
        if type(value) is dict:
            return items
        if type(value) is OrderedDict:
            return OrderedDict(items.items())
        # Hugging Face's outputs are ordered dictionaries that take their fields by keyword.
        return type(value)(**items) if all(isinstance(key, str) for key in items) else value
    if type(value) is list:
        return [_mark(each, named, candidates, marked) for each in value]
    if isinstance(value, tuple) and (type(value) is tuple or hasattr(type(value), "_fields")):
        items = [_mark(each, named, candidates, marked) for each in value]
        return tuple(items) if type(value) is tuple else type(value)(*items)
    return value


def _beside(output: torch.Tensor, named: bool, candidates: list[torch.Tensor]) -> torch.Tensor:
    """An output that is detached if there is a loss: one that is named so, or one of the candidates."""
    return output.detach()


@functools.cache
def marks_in_graphs() -> None:
    """Let Dynamo take marks into its graphs; not at import, for it imports Dynamo, which takes as long as torch."""
    torch.compiler.allow_in_graph(_beside)


# -- once the graph is whole --------------------------------------------------------------------------------------


def settle_roles(graph: fx.GraphModule) -> None:
    """Replace each mark in Dynamo's graph by what it is: detached beside a loss (definition 1), else the output."""
    marks = [node for node in graph.graph.nodes if node.target is _beside]
    if not marks:
        return
    larger: list[fx.Node] = [mark.args[0] for mark in marks]
    named, candidates = marks[0].args[1:]
    there_is_a_loss = named or any(_is_loss(each, larger) for each in candidates)
    for mark, output in zip(marks, larger, strict=True):
        value = output
        if there_is_a_loss and output.op != "placeholder":
            with graph.graph.inserting_before(mark):
                value = graph.graph.call_method("detach", (output,))
            value.meta.update(mark.meta)
        mark.replace_all_uses_with(value)
        graph.graph.erase_node(mark)
    graph.recompile()


def _is_loss(output: fx.Node, larger: Sequence[fx.Node]) -> bool:
    """Whether what ``output`` is computed from makes it the loss (definition 1b)."""
    read, by_larger = _read_by([output]), _read_by(larger)
    own = [node for node in read - by_larger if node.op == "placeholder"]
    if any(is_argument(node) for node in own):
        return True
    return read.issuperset(larger) and not any(
        getattr(node.meta["example_value"], "requires_grad", False) for node in own
    )


def _read_by(roots: Sequence[fx.Node]) -> set[fx.Node]:
    """All nodes that these are computed from, themselves included."""
    seen: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


# -- in the step --------------------------------------------------------------------------------------------------


def loss_is_outside(joint: Captured) -> bool:
    """Whether user code computes the loss from what the step returns (definition 4)."""
    return any(node.meta["val"].numel() != 1 for node in joint.tangents)


class _TakesNoGradient(torch.autograd.Function):
    """The tensor itself, requiring a gradient because the anchor does."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, _anchor: torch.Tensor) -> torch.Tensor:
        ctx.shape = tuple(tensor.shape)
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if gradients[0] is None:  # as from a Function around all outputs, which DistributedDataParallel may lay there
            return None, None
        raise CaptureError(
            f"a gradient arrived for an output of shape {ctx.shape} that is not the loss. The forward returns a scalar "
            "loss beside it, so the step was planned without a gradient through this output, and no gradient of the "
            "step was handed out",
            remedy='use ebbtide.fit(..., options=ebbtide.Options(gradients="all")) to plan for gradients through every '
            "output",
        )


def guarded(outputs: Any, marked: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """``outputs`` of a step, of which those that were detached raise when a gradient arrives; and these.

    Args:
        outputs: of the forward.
        marked: those of them that :func:`loss_only` marked.
    """
    places = {id(tensor) for tensor in marked if not tensor.requires_grad}
    guards: list[torch.Tensor] = []
    if not places:
        return outputs, guards
    anchor = torch.zeros(0, requires_grad=True)

    def guard(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) in places:
            guards.append(_TakesNoGradient.apply(value, anchor))  # type: ignore[arg-type]
            return guards[-1]
        return value

    return pytree.tree_map(guard, outputs), guards
