"""Heads of language models in a joint graph: a linear layer whose result goes into a cross-entropy, and nowhere else.

1. A node is *seen through views* that keep the order of elements (``view``, ``detach`` and the like): they name the
   same numbers.
2. A *head* is the product, a cast of it or none, a cut of its rows or none (``head_cuts``), its log-softmax over the
   last dimension, the negative log-likelihood of class indices by mean, sum or none, and their backward as autograd
   writes it, down to the products that make the gradients of the hidden states and of the weight.
3. With *smoothed labels* the log-probabilities of each row are summed too, and their gradient is that of the loss plus
   one number per row for all classes alike. Sums and numbers are vectors of the captured step.
4. What looks alike and is none is *left*, with the reason and what would change that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from ebbflow.capture.joint import Captured
from ebbflow.capture.origin import module_of, source_of
from ebbflow.rewrites.head_cuts import rows_read
from ebbflow.rewrites.head_facts import HeadSizes
from ebbflow.step.unplanned import unplanned_bytes
from ebbflow.torch_seams.graphs import arguments_of

__all__ = ["SAME_ORDER", "VIEWS", "Head", "Left", "Smoothing", "find_heads", "worthwhile_heads"]

_aten = torch.ops.aten
SAME_ORDER = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.reshape.default,
        _aten.alias.default,
        _aten.detach.default,
    }
)
"""What gives the same elements in the same order."""
VIEWS = SAME_ORDER | {_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.slice.Tensor}
"""What is made of the gradients that a head gives, without new memory."""
_LITTLE = 0.01
"""Of the step's unplanned peak above its start: a head that holds less decides nothing."""


@dataclass(frozen=True)
class Left:
    """Definition 4.

    Attributes:
        source: ``file:line`` of the loss, or empty.
        why: it stays as it is.
    """

    source: str
    why: str


@dataclass(frozen=True)
class Smoothing:
    """Definition 3.

    Attributes:
        sums: of the log-probabilities of each row that is read.
        numbers: one for each of these rows.
        added: the gradient of the log-probabilities, with the numbers in it.
    """

    sums: fx.Node
    numbers: fx.Node
    added: fx.Node


@dataclass(frozen=True)
class Head:
    """Definition 2, as nodes of the joint graph.

    Attributes:
        product: makes the logits.
        cast: copies them to the type of the softmax; ``None`` where they have it.
        softmax: makes the log-probabilities.
        h: hidden states as the product reads them, N x D.
        wt: the weight as the product reads it, D x V.
        bias: or ``None``.
        labels: N class indices.
        loss: the call of the loss, which returns loss and total weight.
        tangent: the loss' gradient.
        backward: makes the gradient of the log-probabilities.
        gradient: makes that of the logits, in the type of the softmax.
        hidden_gradient: makes the gradient of ``h``, N x D.
        weight_gradient: makes that of the weight, V x D; ``None`` where it is frozen.
        bias_gradient: makes that of the bias, 1 x V; ``None`` where there is none or it is frozen.
        returned: outputs of the forward that are the logits.
        reduction: 0 for none, 1 for the mean, 2 for the sum.
        ignore_index: the label that does not count.
        smoothing: sums and numbers of definition 3; ``None`` where labels are not smoothed.
        sizes: N, D, V and what else kernels depend on, the cut among it.
    """

    product: fx.Node
    cast: fx.Node | None
    softmax: fx.Node
    h: fx.Node
    wt: fx.Node
    bias: fx.Node | None
    labels: fx.Node
    loss: fx.Node
    tangent: fx.Node
    backward: fx.Node
    gradient: fx.Node
    hidden_gradient: fx.Node
    weight_gradient: fx.Node | None
    bias_gradient: fx.Node | None
    returned: tuple[fx.Node, ...]
    reduction: int
    ignore_index: int
    smoothing: Smoothing | None
    sizes: HeadSizes

    @property
    def name(self) -> str:
        """For people: the module of the product, or its line."""
        return module_of(self.product) or source_of(self.product) or self.product.name


class _No(Exception):
    """It is no head."""


def find_heads(captured: Captured) -> tuple[list[Head], list[Left]]:
    """All heads of a step, and what is left as it is though it looks like one."""
    heads: list[Head] = []
    left: list[Left] = []
    for node in captured.graph.find_nodes(op="call_function", target=_aten.nll_loss_forward.default):
        try:
            heads.append(_head(captured, node))
        except _No as error:
            left.append(Left(source_of(node), str(error)))
    for node in captured.graph.find_nodes(op="call_function", target=_aten.nll_loss2d_forward.default):
        left.append(Left(source_of(node), "classes are not the last dimension: flatten to N x V and N"))
    return heads, [*left, *_other_losses(captured)]


def _other_losses(captured: Captured) -> Iterator[Left]:
    """Products of which something else is made where ``cross_entropy`` makes a loss, as large as matters."""
    losses = (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
    known = {_source_of(node) for each in losses for node in captured.graph.find_nodes(op="call_function", target=each)}
    for node in captured.graph.nodes:
        if _is_call(node, _aten._log_softmax.default, _aten.logsumexp.default):
            source, dimensions = _source_of(arguments_of(node)[0]), arguments_of(node)[1]
            over = dimensions[0] if isinstance(dimensions, Sequence) else dimensions
            value = arguments_of(node)[0].meta["val"]
            product = _is_call(source, _aten.mm.default, _aten.addmm.default)
            if not product or source in known or over % value.dim() != value.dim() - 1:
                continue
            known.add(source)
            if 3 * value.numel() * value.itemsize >= _LITTLE * unplanned_bytes(captured.program):
                why = "a loss of its own, or one of soft labels: cross_entropy or NLLLoss of class indices is rewritten"
                yield Left(source_of(node), why)


def _source_of(node: Any) -> Any:
    """What ``node``, a loss or its logits, is made of, whatever lies between as a view, a copy, a cut or a softmax."""
    between = (
        _aten._to_copy.default,
        _aten.clone.default,
        _aten.slice.Tensor,
        _aten.transpose.int,
        _aten.permute.default,
        _aten._log_softmax.default,
        _aten.nll_loss_forward.default,
        _aten.nll_loss2d_forward.default,
    )
    while _is_call(node, *between, *SAME_ORDER):
        node = arguments_of(node)[0]
    return node


def worthwhile_heads(captured: Captured) -> list[Head]:
    """Those that hold enough to matter for the step's memory."""
    heads, _ = find_heads(captured)
    least = _LITTLE * unplanned_bytes(captured.program) if heads else 0.0
    return [each for each in heads if each.sizes.held_bytes >= least]


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise _No(why)


def _seen_through(node: Any) -> Any:
    """Definition 1, towards what makes the numbers."""
    while isinstance(node, fx.Node) and node.target in SAME_ORDER:
        node = arguments_of(node)[0]
    return node


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Who reads the numbers of ``node``, and as which node; definition 1 the other way."""
    for user in node.users:
        if user.target in SAME_ORDER:
            yield from _readers(user)
        else:
            yield user, node


def _is_call(node: object, *targets: Callable[..., Any]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _changes_type_only(copy: fx.Node) -> bool:
    before, after = arguments_of(copy)[0].meta["val"], copy.meta["val"]
    known = set(copy.kwargs) <= {"dtype", "layout", "device"}
    return known and before.device == after.device and before.stride() == after.stride()


@dataclass(frozen=True)
class _Way:
    """From a product to what its log-softmax reads.

    Attributes:
        product: makes the logits.
        steps: what is made of them, one from the other, in order: a cast, a slice, a copy of the slice.
        cast: the first of them, or ``None``.
        cut: the slice, or ``None``.
    """

    product: fx.Node
    steps: tuple[fx.Node, ...]
    cast: fx.Node | None
    cut: fx.Node | None


def _way_to(node: fx.Node) -> _Way:
    steps: list[fx.Node] = []
    found: dict[object, fx.Node] = {}
    made = _seen_through(node)
    while _is_call(made, _aten._to_copy.default, _aten.slice.Tensor, _aten.clone.default):
        kind = made.target
        if kind is _aten.clone.default:
            source = _seen_through(arguments_of(made)[0])
            _require(_is_call(source, _aten.slice.Tensor), "the logits are copied before the loss")
            kept = made.kwargs.get("memory_format", torch.contiguous_format) is torch.contiguous_format
            _require(kept and made.meta["val"].is_contiguous(), "the logits are copied to another layout")
        else:
            _require(kind not in found, "logits are cut or cast more than once between product and loss")
            found[kind] = made
        if kind is _aten._to_copy.default:
            _require(_changes_type_only(made), "the logits are copied to another device or layout before the loss")
        steps.insert(0, made)
        made = _seen_through(arguments_of(made)[0])
    return _Way(made, tuple(steps), found.get(_aten._to_copy.default), found.get(_aten.slice.Tensor))


def _cut_of(way: _Way) -> tuple[int, ...]:
    """The rows that are read (``head_cuts``)."""
    if way.cut is None:
        return ()
    source = arguments_of(way.cut)[0].meta["val"]
    dimension, begin, end, step = _slice_of(way.cut)
    _require(step == 1 and dimension < source.dim() - 1, "logits are cut along the classes, or by steps")
    inner = math.prod(source.shape[dimension + 1 : -1])
    return source.shape[dimension] * inner, begin * inner, end * inner


def _slice_of(cut: fx.Node) -> tuple[Any, ...]:
    """Dimension, begin, end and step, none of them negative."""
    given = arguments_of(cut)
    filled: tuple[Any, ...] = (*given, *(0, None, None, 1)[len(given) - 1 :])
    source, dimension, begin, end, step = filled
    value = source.meta["val"]
    dimension %= value.dim()
    begin, end, _ = slice(begin, end).indices(value.shape[dimension])
    return dimension, begin, max(begin, end), step


def _head(captured: Captured, loss: fx.Node) -> Head:
    softmax, labels, weight, reduction, ignore_index = arguments_of(loss)
    softmax = _seen_through(softmax)
    _require(_is_call(softmax, _aten._log_softmax.default), "its log-probabilities are not a log-softmax of this step")
    _require(weight is None, "classes have weights (weight=)")
    value = softmax.meta["val"]
    _require(arguments_of(softmax)[1] in (value.dim() - 1, -1), "classes are not the last dimension")
    _require(arguments_of(softmax)[2] is False, "the softmax changes the type by itself")
    way = _way_to(arguments_of(softmax)[0])
    product, cast = way.product, way.cast
    _require(
        not _is_call(product, _aten.index.Tensor, _aten.index_select.default),
        "rows of the logits are picked before the loss: pick hidden states, or ignore labels",
    )
    _require(
        _is_call(product, _aten.mm.default, _aten.addmm.default) and not product.kwargs,
        "what goes into it is no product of a linear layer alone (scaled, capped, masked or added to)",
    )
    bias, h, wt = arguments_of(product) if len(arguments_of(product)) == 3 else (None, *arguments_of(product))
    logits = product.meta["val"]
    cut = _cut_of(way)
    _require(
        value.shape[-1] == logits.shape[1] and value.numel() == rows_read(logits.shape[0], cut) * logits.shape[1],
        "logits are rearranged between product and loss",
    )
    _require(logits.is_contiguous() and value.is_contiguous(), "logits are not contiguous")
    returned = _only_read_by(product, [*way.steps, softmax][:1], captured)
    for step, reader in pairwise([*way.steps, softmax]):
        _require(not _only_read_by(step, [reader], captured), "the logits are returned in another type or cut")
    backward = [user for user, _ in _readers(softmax) if _is_call(user, _aten.nll_loss_backward.default)]
    _require(len(backward) == 1, "its gradient is not made once")
    smoothing = _smoothing(softmax, loss, backward[0])
    seeds = [user for user, _ in _readers(backward[0] if smoothing is None else smoothing.added)]
    _require(
        len(seeds) == 1 and _is_call(seeds[0], _aten._log_softmax_backward_data.default),
        "the gradient of its log-probabilities has other readers (another loss of the same logits)",
    )
    sums = [] if smoothing is None else [smoothing.sums]
    _only_read_by(softmax, [loss, backward[0], seeds[0], *sums], captured, returned=False)
    _require(arguments_of(seeds[0])[3] == value.dtype, "the softmax changes the type by itself")
    hidden, weights, bias_sums = _products(_back(way, seeds[0]), h, wt)
    _require(isinstance(labels, fx.Node) and labels.meta["val"].dim() == 1, "labels are no vector")
    _require(labels.meta["val"].dtype is torch.int64, "labels are not of type int64")
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
        smoothed=smoothing is not None,
    )
    return Head(
        product=product,
        cast=cast,
        softmax=softmax,
        h=h,
        wt=wt,
        bias=bias,
        labels=labels,
        loss=loss,
        tangent=arguments_of(backward[0])[0],
        backward=backward[0],
        gradient=seeds[0],
        hidden_gradient=hidden,
        weight_gradient=weights,
        bias_gradient=bias_sums,
        returned=returned,
        reduction=reduction,
        ignore_index=ignore_index,
        smoothing=smoothing,
        sizes=sizes,
    )


def _smoothing(softmax: fx.Node, loss: fx.Node, backward: fx.Node) -> Smoothing | None:
    """Definition 3; ``None`` where the gradient of the loss is all that the log-probabilities get.

    Raises:
        _No: if they get something else.
    """
    why = "the gradient of its log-probabilities has other readers (another loss of the same logits)"
    readers = [user for user, _ in _readers(backward)]
    if len(readers) != 1 or not _is_call(readers[0], _aten.add.Tensor):
        return None
    (added,) = readers
    others = [each for each in arguments_of(added) if _seen_through(each) is not backward]
    _require(not added.kwargs and len(others) == 1 and _is_call(others[0], _aten.expand.default), why)
    column, value = arguments_of(others[0])[0], softmax.meta["val"]
    _require(_is_call(column, _aten.unsqueeze.default) and value.dim() == 2, why)
    numbers = arguments_of(column)[0]
    of_rows = column.meta["val"].shape == (value.shape[0], 1) and numbers.meta["val"].dtype == value.dtype
    _require(of_rows and added.meta["val"].shape == value.shape, why)
    sums = [user for user, _ in _readers(softmax) if _is_call(user, _aten.sum.dim_IntList)]
    _require(len(sums) == 1 and not sums[0].kwargs and list(map(list, arguments_of(sums[0])[1:2])) == [[1]], why)
    _require(sums[0].meta["val"].shape == numbers.meta["val"].shape, why)
    place = {node: index for index, node in enumerate(loss.graph.nodes)}
    _require(all(place[loss] < place[each] for each in sums[0].users), "sums of its rows are read before the loss")
    return Smoothing(sums[0], numbers, added)


def _only_read_by(
    node: fx.Node, expected: Sequence[fx.Node], captured: Captured, *, returned: bool = True
) -> tuple[fx.Node, ...]:
    """Outputs of the forward that are ``node``, which nobody else reads than ``expected``.

    Raises:
        _No: if somebody does, or if ``returned`` is false and there are such outputs.
    """
    outputs: list[fx.Node] = []
    for user, read in _readers(node):
        if user.op == "output":
            outputs.append(read)
        else:
            _require(
                user in expected, f"{node.name} has another reader: {user.target} at {source_of(user) or 'no line'}"
            )
    gradients = {each for each in captured.outputs[captured.forward_output_count :] if isinstance(each, fx.Node)}
    _require(not gradients.intersection(outputs), f"{node.name} is a gradient")
    _require(returned or not outputs, f"{node.name} is returned")
    return tuple(dict.fromkeys(outputs))


def _back(way: _Way, gradient: fx.Node) -> fx.Node:
    """From the gradient of what the softmax reads to that of the product."""
    for step in reversed(way.steps):
        if step.target is _aten.clone.default:
            continue
        readers = [user for user, _ in _readers(gradient)]
        _require(len(readers) == 1, "the gradient of the logits has other readers")
        (made,) = readers
        if step is way.cast:
            _require(
                _is_call(made, _aten._to_copy.default) and _changes_type_only(made),
                "the gradient of the logits is not cast back once",
            )
        else:
            _require(_is_call(made, _aten.slice_backward.default), "the gradient of the logits is not spread again")
            _, sizes, dimension, begin, end, by = arguments_of(made)
            source = arguments_of(step)[0].meta["val"]
            given = (dimension % source.dim(), *slice(begin, end).indices(source.shape[dimension])[:2], by)
            _require(
                list(sizes) == list(source.shape) and given == _slice_of(step),
                "the gradient of the logits is spread in another way",
            )
        gradient = made
    return gradient


def _products(source: fx.Node, h: fx.Node, wt: fx.Node) -> tuple[fx.Node, fx.Node | None, fx.Node | None]:
    """What makes the gradients of ``h``, of the weight and of the bias from that of the product."""
    hidden: list[fx.Node] = []
    weights: list[fx.Node] = []
    sums: list[fx.Node] = []
    for user, read in _readers(source):
        if _is_call(user, _aten.t.default):
            for reader, _ in _readers(user):
                _require(_is_call(reader, _aten.mm.default), "the gradient of the logits has other readers")
                same = _seen_through(arguments_of(reader)[1]) is _seen_through(h) and arguments_of(reader)[0] is user
                _require(same, "the gradient of the weight is made in another order")
                weights.append(reader)
        elif _is_call(user, _aten.mm.default):
            _require(arguments_of(user)[0] is read, "the gradient of the weight is made in another order")
            other = arguments_of(user)[1]
            _require(
                _is_call(other, _aten.t.default) and _seen_through(arguments_of(other)[0]) is wt,
                "dh is no product of it",
            )
            hidden.append(user)
        elif _is_call(user, _aten.sum.dim_IntList):
            _require(list(arguments_of(user)[1]) == [0], "the gradient of the bias is no sum over rows")
            sums.append(user)
        else:
            raise _No("the gradient of the logits has other readers")
    _require(len(hidden) == 1, "nothing before the head is trained")
    _require(len(weights) <= 1 and len(sums) <= 1, "the head's weight is used twice")
    _require(bool(weights) or not sums, "the bias is trained and the weight is not")
    return hidden[0], next(iter(weights), None), next(iter(sums), None)
