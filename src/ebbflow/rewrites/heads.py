"""Heads of language models in a joint graph: a linear layer whose result goes into a cross-entropy, and nowhere else.

1. A node is *seen through views* that keep the order of elements (``view``, ``detach`` and the like): they name the
   same numbers.
2. A *head* is the product, a cast of it or none, its log-softmax over the last of two dimensions, the negative
   log-likelihood of class indices by mean or sum, and their backward as autograd writes it, down to the products that
   make the gradients of the hidden states and of the weight.
3. What looks alike and is none is *left*, with the reason and what would change that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ebbflow.capture.joint import Captured
from ebbflow.capture.origin import module_of, source_of
from ebbflow.rewrites.head_facts import HeadSizes
from ebbflow.step.unplanned import unplanned_bytes
from ebbflow.torch_seams.graphs import arguments_of

__all__ = ["VIEWS", "Head", "Left", "find_heads", "worthwhile_heads"]

_aten = torch.ops.aten
_SAME_ORDER = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.reshape.default,
        _aten.alias.default,
        _aten.detach.default,
    }
)
VIEWS = _SAME_ORDER | {_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.slice.Tensor}
"""What is made of the gradients that a head gives, without new memory."""
_REDUCTIONS = (1, 2)
_LITTLE = 0.01
"""Of the step's unplanned peak above its start: a head that holds less decides nothing."""


@dataclass(frozen=True)
class Left:
    """Definition 3.

    Attributes:
        source: ``file:line`` of the loss, or empty.
        why: it stays as it is.
    """

    source: str
    why: str


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
        reduction: 1 for the mean, 2 for the sum.
        ignore_index: the label that does not count.
        sizes: N, D, V and what else kernels depend on.
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
    return heads, left


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
    while isinstance(node, fx.Node) and node.target in _SAME_ORDER:
        node = arguments_of(node)[0]
    return node


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Who reads the numbers of ``node``, and as which node; definition 1 the other way."""
    for user in node.users:
        if user.target in _SAME_ORDER:
            yield from _readers(user)
        else:
            yield user, node


def _is_call(node: object, *targets: Callable[..., Any]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _changes_type_only(copy: fx.Node) -> bool:
    before, after = arguments_of(copy)[0].meta["val"], copy.meta["val"]
    known = set(copy.kwargs) <= {"dtype", "layout", "device"}
    return known and before.device == after.device and before.stride() == after.stride()


def _cast_of(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """What ``node`` is a copy of in another floating-point type, and that copy; itself where it is none."""
    made = _seen_through(node)
    if not _is_call(made, _aten._to_copy.default):
        return made, None
    _require(_changes_type_only(made), "the logits are copied to another device or layout before the loss")
    return _seen_through(arguments_of(made)[0]), made


def _head(captured: Captured, loss: fx.Node) -> Head:
    softmax, labels, weight, reduction, ignore_index = arguments_of(loss)
    softmax = _seen_through(softmax)
    _require(_is_call(softmax, _aten._log_softmax.default), "its log-probabilities are not a log-softmax of this step")
    _require(weight is None, "classes have weights (weight=)")
    _require(reduction in _REDUCTIONS, "it has no single value (reduction='none')")
    value = softmax.meta["val"]
    _require(value.dim() == 2 and arguments_of(softmax)[1] in (1, -1), "classes are not the last of two dimensions")
    _require(arguments_of(softmax)[2] is False, "the softmax changes the type by itself")
    product, cast = _cast_of(arguments_of(softmax)[0])
    _require(
        not _is_call(product, _aten.slice.Tensor, _aten.clone.default, _aten.index.Tensor),
        "logits are cut before the loss (logits[:, :-1]): cut the tokens or hidden states, or pad and shift the labels",
    )
    _require(
        _is_call(product, _aten.mm.default, _aten.addmm.default) and not product.kwargs,
        "what goes into it is no product of a linear layer alone (scaled, capped, masked or added to)",
    )
    bias, h, wt = arguments_of(product) if len(arguments_of(product)) == 3 else (None, *arguments_of(product))
    logits = product.meta["val"]
    _require(logits.shape == value.shape, "logits are cut or rearranged between product and loss")
    _require(logits.is_contiguous() and value.is_contiguous(), "logits are not contiguous")
    returned = _only_read_by(product, [cast or softmax], captured)
    if cast is not None:
        _require(not _only_read_by(cast, [softmax], captured), "the logits are returned in another type")
    backward = [user for user, _ in _readers(softmax) if _is_call(user, _aten.nll_loss_backward.default)]
    _require(len(backward) == 1, "its gradient is not made once")
    seeds = [user for user, _ in _readers(backward[0])]
    _require(
        len(seeds) == 1 and _is_call(seeds[0], _aten._log_softmax_backward_data.default),
        "the gradient of its log-probabilities has other readers (label smoothing, another loss of the same logits)",
    )
    _only_read_by(softmax, [loss, backward[0], seeds[0]], captured, returned=False)
    _require(arguments_of(seeds[0])[3] == value.dtype, "the softmax changes the type by itself")
    hidden, weights, sums = _products(seeds[0], cast, h, wt)
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
        bias_gradient=sums,
        returned=returned,
        reduction=reduction,
        ignore_index=ignore_index,
        sizes=sizes,
    )


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


def _products(
    gradient: fx.Node, cast: fx.Node | None, h: fx.Node, wt: fx.Node
) -> tuple[fx.Node, fx.Node | None, fx.Node | None]:
    """What makes the gradients of ``h``, of the weight and of the bias from that of the logits."""
    source = gradient
    if cast is not None:
        readers = [user for user, _ in _readers(gradient)]
        _require(
            len(readers) == 1 and _is_call(readers[0], _aten._to_copy.default) and _changes_type_only(readers[0]),
            "the gradient of the logits is not cast back once",
        )
        source = readers[0]
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
