"""Heads of language models in a joint graph: a linear layer whose result goes into a cross-entropy, and nowhere else.

1. Nodes are *seen through views* that keep the order of elements (``heads.logit_path``).
2. A *head* is the product, a cast of it or none, numbers that scale and caps that bend it (``heads.logit_ops``), a cut
   of its rows or none (``heads.cuts``), its log-softmax over the last dimension, the negative log-likelihood of class
   indices by mean, sum or none, and their backward as autograd writes it, down to
   the products that make the gradients of the hidden states and of the weight.
3. With *smoothed labels* the log-probabilities of each row are summed too, and their gradient is that of the loss plus
   one number per row for all classes alike. Sums and numbers are vectors of the captured step.
4. What looks alike and is none is *left*, with the reason and what would change that.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.capture.origin import module_of, source_of
from ebbtide.rewrites.heads.cuts import rows_read
from ebbtide.rewrites.heads.facts import HeadSizes
from ebbtide.rewrites.heads.logit_path import (
    BENDS,
    cut_of,
    is_call,
    path_back,
    path_to,
)
from ebbtide.rewrites.once import once
from ebbtide.rewrites.rule import NoPlace, Skipped, require
from ebbtide.rewrites.views import SAME_ORDER, readers, seen_through
from ebbtide.step.rewrite import Rewrite
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.torch_seams.graphs import arguments_of

__all__ = ["Head", "find_heads", "head_at", "worthwhile_heads"]

_aten = torch.ops.aten
_LITTLE = 0.01
"""Share of the step's unplanned peak above its start: a head that holds less decides nothing."""


@dataclass(frozen=True)
class Head:
    """A head (definition 2), as nodes of the joint graph.

    Attributes:
        product: makes the logits.
        steps: what makes the log-probabilities of them: a cast, what scales and bends them, the softmax, in order.
        loss: the call of the loss, which returns loss and total weight.
        steps_back: what makes the gradient of the product of the loss' gradient: those of the log-probabilities, of
            what the softmax reads, of the steps before it.
        hidden_gradient: makes the gradient of ``h``, N x D.
        weight_gradient: makes that of the weight, V x D; ``None`` where it is frozen.
        bias_gradient: makes that of the bias, 1 x V; ``None`` where there is none or it is frozen.
        row_sums: sums of definition 3; ``None`` where labels are not smoothed.
        sizes: N, D, V and what else kernels depend on, the cut among it.
        arguments: what ops read of it, nodes and settings by the names of their arguments (``heads.ops``).
    """

    product: fx.Node
    steps: tuple[fx.Node, ...]
    loss: fx.Node
    steps_back: tuple[fx.Node, ...]
    hidden_gradient: fx.Node
    weight_gradient: fx.Node | None
    bias_gradient: fx.Node | None
    row_sums: fx.Node | None
    sizes: HeadSizes
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        """For people: the module of the product, or its line."""
        return module_of(self.product) or source_of(self.product) or self.product.name


@once
def find_heads(captured: Captured) -> tuple[list[Head], list[Skipped]]:
    """All heads of a step, and what is left as it is though it looks like one."""
    heads: list[Head] = []
    left: list[Skipped] = []
    for node in captured.graph.find_nodes(op="call_function", target=_aten.nll_loss_forward.default):
        try:
            heads.append(_head(captured, node))
        except NoPlace as error:
            left.append(Skipped(source_of(node), str(error)))
    for node in captured.graph.find_nodes(op="call_function", target=_aten.nll_loss2d_forward.default):
        left.append(Skipped(source_of(node), "classes are not the last dimension: flatten to N x V and N"))
    return heads, [*left, *_other_losses(captured)]


def _other_losses(captured: Captured) -> Iterator[Skipped]:
    """Products of which something else is made where ``cross_entropy`` makes a loss, as large as matters."""
    losses = (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
    known = {_source_of(node) for each in losses for node in captured.graph.find_nodes(op="call_function", target=each)}
    for node in captured.graph.nodes:
        if is_call(node, _aten._log_softmax.default, _aten.logsumexp.default):
            source, dimensions = _source_of(arguments_of(node)[0]), arguments_of(node)[1]
            over = dimensions[0] if isinstance(dimensions, Sequence) else dimensions
            value = arguments_of(node)[0].meta["val"]
            product = is_call(source, _aten.mm.default, _aten.addmm.default)
            if not product or source in known or over % value.dim() != value.dim() - 1:
                continue
            known.add(source)
            if 3 * value.numel() * value.itemsize >= _LITTLE * unplanned_bytes(captured.program):
                why = "a loss of its own, or one of soft labels: cross_entropy or NLLLoss of class indices is rewritten"
                yield Skipped(source_of(node), why)


def _source_of(node: Any) -> Any:
    """What ``node``, a loss or its logits, is made of, whatever lies between as a view, a copy, a cut or a softmax."""
    logit_ops = (
        _aten._to_copy.default,
        _aten.clone.default,
        _aten.slice.Tensor,
        _aten.transpose.int,
        _aten.permute.default,
        _aten._log_softmax.default,
        _aten.nll_loss_forward.default,
        _aten.nll_loss2d_forward.default,
        *BENDS,
    )
    while is_call(node, *logit_ops, *SAME_ORDER):
        node = arguments_of(node)[0]
    return node


def head_at(step: Captured, rewrite: Rewrite) -> Head:
    """The head that ``rewrite`` is of; raises ``LookupError`` if ``step`` has none there."""
    for head in find_heads(step)[0]:
        if head.loss.name == rewrite.at:
            return head
    raise LookupError(f"it has no linear layer with a cross-entropy at {rewrite.at}")


def worthwhile_heads(captured: Captured) -> list[Head]:
    """Those that hold enough to matter for the step's memory."""
    heads, _ = find_heads(captured)
    least = _LITTLE * unplanned_bytes(captured.program) if heads else 0.0
    return [each for each in heads if each.sizes.held_bytes >= least]


def _head(captured: Captured, loss: fx.Node) -> Head:
    softmax, labels, class_weights, reduction, ignore_index = arguments_of(loss)
    require(class_weights is None, "classes have weights (weight=)")
    softmax = seen_through(softmax)
    require(is_call(softmax, _aten._log_softmax.default), "its log-probabilities are not a log-softmax of this step")
    value = softmax.meta["val"]
    require(arguments_of(softmax)[1] in (value.dim() - 1, -1), "classes are not the last dimension")
    require(arguments_of(softmax)[2] is False, "the softmax changes the type by itself")
    path = path_to(arguments_of(softmax)[0])
    product = path.product
    require(
        not is_call(product, _aten.index.Tensor, _aten.index_select.default),
        "rows of the logits are picked before the loss: pick hidden states, or ignore labels",
    )
    require(
        is_call(product, _aten.mm.default, _aten.addmm.default) and not product.kwargs,
        "what goes into it is no product of a linear layer alone (masked, added to, or bent otherwise than by tanh)",
    )
    bias, h, wt = arguments_of(product) if len(arguments_of(product)) == 3 else (None, *arguments_of(product))
    logits = product.meta["val"]
    cut = cut_of(path)
    require(
        value.shape[-1] == logits.shape[1] and value.numel() == rows_read(logits.shape[0], cut) * logits.shape[1],
        "logits are rearranged between product and loss",
    )
    require(logits.is_contiguous() and value.is_contiguous(), "logits are not contiguous")
    _only_read_by(product, [*path.steps, softmax][:1], captured)
    backward = [user for user, _ in readers(softmax) if is_call(user, _aten.nll_loss_backward.default)]
    require(len(backward) == 1, "its gradient is not made once")
    require(_is_of(backward[0], loss), "its gradient is made in another way than the loss")
    row_sums, numbers, added = _smoothing(softmax, loss, backward[0]) or (None, None, None)
    seeds = [user for user, _ in readers(backward[0] if added is None else added)]
    require(
        len(seeds) == 1 and is_call(seeds[0], _aten._log_softmax_backward_data.default),
        "the gradient of its log-probabilities has other readers (another loss of the same logits)",
    )
    _only_read_by(softmax, [loss, backward[0], seeds[0], *_some(row_sums)], captured, returned=False)
    require(arguments_of(seeds[0])[3] == value.dtype, "the softmax changes the type by itself")
    last, back = path_back(path, seeds[0])
    read_again = [each for each in back if is_call(each, _aten.tanh_backward.default)]
    for step, reader in pairwise([*path.steps, softmax]):
        outputs = _only_read_by(step, [reader, *read_again], captured)
        require(not outputs or step in path.logit_ops, "the logits are returned in another type or cut")
    hidden, weights, bias_sums = _products(last, h, wt)
    require(isinstance(labels, fx.Node) and labels.meta["val"].dim() == 1, "labels are no vector")
    require(labels.meta["val"].dtype is torch.int64, "labels are not of type int64")
    h_value, wt_value = h.meta["val"], wt.meta["val"]
    sizes = HeadSizes(
        rows=logits.shape[0],
        width=h_value.shape[1],
        vocabulary=logits.shape[1],
        dtype=logits.dtype,
        softmax=value.dtype,
        h_stride=tuple(h_value.stride()),
        wt_stride=tuple(wt_value.stride()),
        bias=bias is not None,
        reduction=reduction,
        device=logits.device.type,
        cut=cut,
        smoothed=row_sums is not None,
        logit_ops=path.text,
    )
    arguments = {
        "h": h,
        "wt": wt,
        "bias": bias,
        "labels": labels,
        "tangent": arguments_of(backward[0])[0],
        "numbers": numbers,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "cut": list(cut),
        "logit_ops": path.text,
        "dtype": value.dtype,
        "smoothed": row_sums is not None,
        "trains": weights is not None,
    }
    steps = (*(each for each in path.steps if each is path.cast or each in path.logit_ops), softmax)
    steps_back = (*_some(added), backward[0], seeds[0], *back)
    return Head(product, steps, loss, steps_back, hidden, weights, bias_sums, row_sums, sizes, arguments)


def _some(node: fx.Node | None) -> list[fx.Node]:
    return [] if node is None else [node]


def _smoothing(softmax: fx.Node, loss: fx.Node, backward: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Sums and numbers of smoothed labels (definition 3), and the gradient of the log-probabilities with these in it.

    ``None`` where the log-probabilities get the gradient of the loss alone.

    Raises:
        NoPlace: if they get something else.
    """
    why = "the gradient of its log-probabilities has other readers (another loss of the same logits)"
    found = [user for user, _ in readers(backward)]
    if len(found) != 1 or not is_call(found[0], _aten.add.Tensor):
        return None
    (added,) = found
    others = [each for each in arguments_of(added) if seen_through(each) is not backward]
    require(not added.kwargs and len(others) == 1 and is_call(others[0], _aten.expand.default), why)
    column, value = arguments_of(others[0])[0], softmax.meta["val"]
    require(is_call(column, _aten.unsqueeze.default) and value.dim() == 2, why)
    numbers = arguments_of(column)[0]
    of_rows = column.meta["val"].shape == (value.shape[0], 1) and numbers.meta["val"].dtype == value.dtype
    require(of_rows and added.meta["val"].shape == value.shape, why)
    sums = [user for user, _ in readers(softmax) if is_call(user, _aten.sum.dim_IntList)]
    require(len(sums) == 1 and not sums[0].kwargs and list(map(list, arguments_of(sums[0])[1:2])) == [[1]], why)
    require(sums[0].meta["val"].shape == numbers.meta["val"].shape, why)
    place = {node: index for index, node in enumerate(loss.graph.nodes)}
    require(all(place[loss] < place[each] for each in sums[0].users), "sums of its rows are read before the loss")
    return sums[0], numbers, added


def _only_read_by(
    node: fx.Node, expected: Sequence[fx.Node], captured: Captured, *, returned: bool = True
) -> tuple[fx.Node, ...]:
    """Outputs of the forward that are ``node``, which nobody else reads than ``expected``.

    Raises:
        NoPlace: if somebody does, or if ``returned`` is false and there are such outputs.
    """
    outputs: list[fx.Node] = []
    for user, read in readers(node):
        if user.op == "output":
            outputs.append(read)
        else:
            require(
                user in expected, f"{node.name} has another reader: {user.target} at {source_of(user) or 'no line'}"
            )
    gradients = {each for each in captured.outputs[captured.forward_output_count :] if isinstance(each, fx.Node)}
    require(not gradients.intersection(outputs), f"{node.name} is a gradient")
    require(returned or not outputs, f"{node.name} is returned")
    return tuple(dict.fromkeys(outputs))


def _is_of(backward: fx.Node, loss: fx.Node) -> bool:
    """Whether ``backward`` reads the labels, constants and total weight of ``loss``."""
    _, labels, _, reduction, ignore_index = arguments_of(loss)
    *_, theirs, weights, by, ignored, total = arguments_of(backward)
    same = seen_through(theirs) is seen_through(labels) and (by, ignored) == (reduction, ignore_index)
    total = seen_through(total)
    of_loss = is_call(total, operator.getitem) and arguments_of(total) == (loss, 1)
    return same and of_loss and weights is None


def _products(source: fx.Node, h: fx.Node, wt: fx.Node) -> tuple[fx.Node, fx.Node | None, fx.Node | None]:
    """What makes the gradients of ``h``, of the weight and of the bias from that of the product."""
    hidden: list[fx.Node] = []
    weights: list[fx.Node] = []
    sums: list[fx.Node] = []
    for user, read in readers(source):
        if is_call(user, _aten.t.default):
            for reader, _ in readers(user):
                require(is_call(reader, _aten.mm.default), "the gradient of the logits has other readers")
                same = seen_through(arguments_of(reader)[1]) is seen_through(h) and arguments_of(reader)[0] is user
                require(same, "the gradient of the weight is made in another order")
                weights.append(reader)
        elif is_call(user, _aten.mm.default):
            require(arguments_of(user)[0] is read, "the gradient of the weight is made in another order")
            other = arguments_of(user)[1]
            require(
                is_call(other, _aten.t.default) and seen_through(arguments_of(other)[0]) is wt,
                "dh is no product of it",
            )
            hidden.append(user)
        elif is_call(user, _aten.sum.dim_IntList):
            require(list(map(list, arguments_of(user)[1:2])) == [[0]], "the gradient of the bias is no sum over rows")
            require(user.meta["val"].dim() == 2, "the gradient of the bias has another shape")
            sums.append(user)
        else:
            raise NoPlace("the gradient of the logits has other readers")
    require(len(hidden) == 1, "nothing before the head is trained")
    require(len(weights) <= 1 and len(sums) <= 1, "the head's weight is used twice")
    require(bool(weights) or not sums, "the bias is trained and the weight is not")
    return hidden[0], next(iter(weights), None), next(iter(sums), None)
