"""The path from the product of a head to its log-softmax, and that of the gradient back, in a joint graph.

On it logits are cast, scaled and capped (``heads.logit_ops``), and cut (``heads.cuts``), one after the other; all else
is left, with the reason. A node is *seen through views* that keep the order of elements: they name the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ebbtide.rewrites.heads.logit_ops import CAST, DIV, MUL, TANH
from ebbtide.rewrites.rule import NoPlace, require
from ebbtide.rewrites.views import readers, seen_through
from ebbtide.torch_seams.graphs import arguments_of

__all__ = [
    "BENDS",
    "LogitPath",
    "cut_of",
    "is_call",
    "path_back",
    "path_to",
]

_aten = torch.ops.aten
BENDS = {_aten.div.Tensor: DIV, _aten.mul.Tensor: MUL, _aten.tanh.default: TANH}
"""What scales and caps, by its word for ``heads.logit_ops``."""
_CUT_FIRST = "logits are scaled or capped after they are cut: cut them after that"


def is_call(node: object, *targets: Callable[..., Any]) -> bool:
    """Whether ``node`` calls one of ``targets``."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _changes_type_only(copy: fx.Node) -> bool:
    before, after = arguments_of(copy)[0].meta["val"], copy.meta["val"]
    known = set(copy.kwargs) <= {"dtype", "layout", "device"}
    return known and before.device == after.device and before.stride() == after.stride()


@dataclass(frozen=True)
class LogitPath:
    """From a product to what its log-softmax reads.

    Attributes:
        product: makes the logits.
        steps: what is made of them, one from the other, in order: a cast, a slice, a copy of the slice.
        cast: the one among them, or ``None``.
        cut: the slice, or ``None``.
    """

    product: fx.Node
    steps: tuple[fx.Node, ...]
    cast: fx.Node | None
    cut: fx.Node | None

    @property
    def logit_ops(self) -> tuple[fx.Node, ...]:
        """Those that scale and bend, which come before the cut."""
        return tuple(each for each in self.steps if each.target in BENDS)

    @property
    def text(self) -> str:
        """For ``heads.logit_ops``; empty where there is none of these."""
        if not self.logit_ops:
            return ""
        words = [_word_of(each) for each in self.steps if each is self.cast or each in self.logit_ops]
        return ", ".join(words)


def _word_of(step: fx.Node) -> str:
    if step.target is _aten._to_copy.default:
        return CAST
    numbers = arguments_of(step)[1:]
    return " ".join([BENDS[step.target], *(repr(float(each)) for each in numbers)])  # type: ignore[index]


def _require_bends(node: fx.Node) -> None:
    """That ``node`` scales by a number, or bends, its operand as it lies."""
    source, *numbers = arguments_of(node)
    if is_call(seen_through(source), _aten.slice.Tensor):
        raise NoPlace(_CUT_FIRST)
    numeric = all(isinstance(each, int | float) and float(each) == each for each in numbers)
    require(numeric and not node.kwargs, "the logits are scaled by a tensor before the loss")
    before, after = source.meta["val"], node.meta["val"]
    same = (before.shape, before.stride(), before.dtype) == (after.shape, after.stride(), after.dtype)
    require(same, "the logits are scaled to another type or layout before the loss")


def path_to(node: fx.Node) -> LogitPath:
    """From what a log-softmax reads back to what makes its logits; raises :class:`NoPlace`."""
    steps: list[fx.Node] = []
    found: dict[object, fx.Node] = {}
    made = seen_through(node)
    while is_call(made, _aten._to_copy.default, _aten.slice.Tensor, _aten.clone.default, *BENDS):
        kind = made.target
        if kind in BENDS:
            _require_bends(made)
        elif kind is _aten.slice.Tensor and any(each.target in BENDS for each in steps):
            raise NoPlace(_CUT_FIRST)
        elif kind is _aten.clone.default:
            source = seen_through(arguments_of(made)[0])
            require(is_call(source, _aten.slice.Tensor), "the logits are copied before the loss")
            kept = made.kwargs.get("memory_format", torch.contiguous_format) is torch.contiguous_format
            require(kept and made.meta["val"].is_contiguous(), "the logits are copied to another layout")
        if kind is _aten._to_copy.default or kind is _aten.slice.Tensor:
            require(kind not in found, "logits are cut or cast more than once between product and loss")
            found[kind] = made
        if kind is _aten._to_copy.default:
            require(_changes_type_only(made), "the logits are copied to another device or layout before the loss")
        steps.insert(0, made)
        made = seen_through(arguments_of(made)[0])
    return LogitPath(made, tuple(steps), found.get(_aten._to_copy.default), found.get(_aten.slice.Tensor))


def cut_of(path: LogitPath) -> tuple[int, ...]:
    """The rows that are read (``heads.cuts``)."""
    if path.cut is None:
        return ()
    source = arguments_of(path.cut)[0].meta["val"]
    dimension, begin, end, step = _slice_of(path.cut)
    require(step == 1 and dimension < source.dim() - 1, "logits are cut along the classes, or by steps")
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


def _bent_back(step: fx.Node, node: fx.Node, gradient: fx.Node) -> bool:
    """Whether ``node`` is the gradient of the operand of ``step``, of which ``gradient`` is the result's."""
    if step.target is _aten.tanh.default:
        known = is_call(node, _aten.tanh_backward.default)
        return known and seen_through(arguments_of(node)[1]) is step
    same = node.target is step.target and not node.kwargs
    return same and arguments_of(node)[1:] == arguments_of(step)[1:] and seen_through(node.args[0]) is gradient


def path_back(path: LogitPath, gradient: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """From the gradient of what the softmax reads to that of the product; and the ops that cast, scale and bend it."""
    back: list[fx.Node] = []
    for step in reversed(path.steps):
        if step.target is _aten.clone.default:
            continue
        found = [user for user, _ in readers(gradient)]
        require(len(found) == 1, "the gradient of the logits has other readers")
        (made,) = found
        if step is path.cast:
            require(
                is_call(made, _aten._to_copy.default) and _changes_type_only(made),
                "the gradient of the logits is not cast back once",
            )
            back.append(made)
        elif step in path.logit_ops:
            require(_bent_back(step, made, gradient), "the gradient of the logits is scaled or capped in another way")
            back.append(made)
        else:
            require(is_call(made, _aten.slice_backward.default), "the gradient of the logits is not spread again")
            _, sizes, dimension, begin, end, by = arguments_of(made)
            source = arguments_of(step)[0].meta["val"]
            given = (dimension % source.dim(), *slice(begin, end).indices(source.shape[dimension])[:2], by)
            require(
                list(sizes) == list(source.shape) and given == _slice_of(step),
                "the gradient of the logits is spread in another way",
            )
        gradient = made
    return gradient, tuple(back)
