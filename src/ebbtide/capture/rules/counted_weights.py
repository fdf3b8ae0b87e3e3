"""The sum of the weights of all labels that count, as eager's smoothed loss of weighted classes makes it.

``F.cross_entropy(weight=, label_smoothing=)`` divides a mean by that sum. On plain tensors torch picks the labels that
count and sums their weights; on others, fake ones among them, it sums the weights of all labels with zeros for those
that do not count (``cross_entropy_loss_label_smoothing`` in aten/src/ATen/native/LossNLL.cpp), in another order, with
other last bits. The number of labels that count is known when the step runs, so the sum as eager makes it is one op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ebbtide.capture.origin import source_of
from ebbtide.torch_seams.graphs import arguments_of

__all__ = ["count_as_eager"]

_aten = torch.ops.aten
_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.detach.default})
_LOSSES = (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)


@torch.library.custom_op("ebbtide::weights_that_count", mutates_args=())
def weights_that_count(weights: Tensor, labels: Tensor, ignored: Tensor) -> Tensor:
    """The sum of the weights of ``labels`` that are not ``ignored``."""
    return weights.gather(0, labels.flatten().masked_select(~ignored.flatten())).sum()


@weights_that_count.register_fake
def _(weights: Tensor, labels: Tensor, ignored: Tensor) -> Tensor:
    return weights.new_empty(())


def count_as_eager(graph: fx.Graph) -> None:
    """Put the op in the place of each such sum of a loss in ``graph``."""
    losses = [node for target in _LOSSES for node in graph.find_nodes(op="call_function", target=target)]
    for node in graph.find_nodes(op="call_function", target=_aten.sum.default) if losses else ():
        found = _summed(node)
        if found is None or not any(_is_of(loss, node, *found) for loss in losses):
            continue
        with graph.inserting_before(node):
            made = graph.call_function(torch.ops.ebbtide.weights_that_count.default, found)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        _erase(graph, node)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """``node``, and what nobody else reads of what it reads."""
    if node.users or node.op != "call_function":
        return
    read = node.all_input_nodes
    graph.erase_node(node)
    for each in read:
        _erase(graph, each)


def _summed(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Weights, labels and which of these are ignored, where ``node`` sums weights as torch does on fake tensors."""
    filled = _call(arguments_of(node)[0], _aten.masked_fill.Scalar)
    if filled is None or len(arguments_of(node)) > 1 or node.kwargs:
        return None
    source, ignored, zero = filled
    ignored = _seen(ignored)
    picked = _call(source, _aten.gather.default)
    if picked is None or zero != 0 or picked[1] != 0:
        return None
    weights, _, indices = picked
    known = _call(indices, _aten.masked_fill.Scalar)
    if known is None or _seen(known[1]) is not ignored or known[2] != 0:
        return None
    compared = _call(ignored, _aten.eq.Scalar)
    labels = _seen(known[0])
    return (weights, labels, ignored) if compared is not None and _seen(compared[0]) is labels else None


def _seen(node: Any) -> Any:
    """Through views that keep the order of elements."""
    while isinstance(node, fx.Node) and node.target in _VIEWS:
        node = arguments_of(node)[0]
    return node


def _call(node: Any, target: object) -> tuple[Any, ...] | None:
    """The arguments of ``node``, seen through views, if it calls ``target``."""
    node = _seen(node)
    return arguments_of(node) if isinstance(node, fx.Node) and node.target is target else None


def _is_of(loss: fx.Node, node: fx.Node, weights: fx.Node, labels: fx.Node, ignored: fx.Node) -> bool:
    """Whether the mean of ``loss`` is what the sum divides: of the same line, weights, labels and ignored label."""
    _, theirs, of_classes, reduction, ignore_index = arguments_of(loss)
    same = _seen(theirs) is labels and of_classes is weights and arguments_of(ignored)[1] == ignore_index
    return same and reduction == 1 and source_of(loss) == source_of(node)
