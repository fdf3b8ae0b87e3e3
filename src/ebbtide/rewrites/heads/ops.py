"""The ops of ``heads.kernels`` as data: what they read and give of a head, and what they do besides.

1. A *part* is read by ops of the same head alone; all else is a value of the captured step.
2. Arithmetic is counted in products of N x D, D x V. Rooflines and ``FlopCounterMode`` ask: without it an op of three
   products would count as its traffic alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ebbtide.rewrites.heads import kernels
from ebbtide.step.op_traits import NAMESPACE, OpTraits, declare_op
from ebbtide.torch_seams.dispatcher import flop_registry, register_flop_formula

__all__ = ["HEAD_OPS", "PARTS", "HeadOp", "head_op"]

PARTS = frozenset({"statistics", "hidden", "known", "kept"})
"""Parts by the names of arguments and results (definition 1); ``hidden`` and ``known`` are made by a guess."""


@dataclass(frozen=True)
class HeadOp:
    """One of them.

    Attributes:
        gives: its results, in order.
        products: how many products of the head's size it makes, of its arguments.
        takes: parts among its arguments.
        h_at: position of the hidden states, which the weight follows.
        writes: arguments that it writes over.
        may_take_more: whether some runs need more workspace than others.
    """

    gives: tuple[str, ...]
    products: Callable[..., float]
    takes: tuple[str, ...] = ()
    h_at: int = 0
    writes: frozenset[str] = frozenset()
    may_take_more: bool = False


_GRADIENTS = ("hidden_gradient", "weight_gradient", "bias_gradient")
HEAD_OPS = {
    "forward_by_rows": HeadOp(("loss", "total_weight", "statistics"), lambda *_: 1),
    "forward_with_guess": HeadOp(("loss", "total_weight", "statistics", "hidden", "known"), lambda *_: 2),
    "forward_that_keeps": HeadOp(("loss", "total_weight", "kept", "row_sums"), lambda *_: 1),
    "backward_over_kept": HeadOp(
        _GRADIENTS, lambda *call: 1 + bool(call[-1]), takes=("kept",), h_at=1, writes=frozenset({"kept"})
    ),
    "backward_by_rows": HeadOp(_GRADIENTS[:1], lambda *_: 2),
    "settle_guess": HeadOp(_GRADIENTS[:1], lambda *_: 0, takes=("hidden",), h_at=2, may_take_more=True),
    "backward_by_columns": HeadOp(_GRADIENTS[1:], lambda *_: 2, takes=("statistics",)),
    "backward_by_other_columns": HeadOp(
        _GRADIENTS[1:],
        lambda known, _, __, wt, *___: 2 - known.shape[1] / wt.shape[1],
        takes=("known", "statistics"),
        h_at=2,
    ),
}
"""By their names; a guess is counted as right."""


def head_op(target: object) -> str:
    """The name of the op that ``target`` is, as an overload or its text; empty if it is none of a head."""
    name = str(target).removeprefix(f"{NAMESPACE}.").partition(".")[0]
    return name if name in HEAD_OPS and str(target).startswith(NAMESPACE) else ""


def _flops(op: HeadOp, *call: Any, out_val: object = None) -> int:
    h, wt = call[op.h_at], call[op.h_at + 1]
    return round(2 * h.numel() * wt.shape[1] * op.products(*call))


for _name, _op in HEAD_OPS.items():
    declare_op(_name, OpTraits(_op.writes, small=frozenset({"h"}), may_take_more=_op.may_take_more))
    if (_packet := getattr(getattr(torch.ops, kernels.NAMESPACE), _name)) not in flop_registry:
        register_flop_formula(_packet, get_raw=True)(partial(_flops, _op))
