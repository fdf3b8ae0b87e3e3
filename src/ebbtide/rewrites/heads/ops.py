"""The ops of heads, each declared once: what it reads and gives by name, from which all else about it follows.

1. Names say what a value is: an operand or a setting of the head (``find.Head.arguments``), a size of slices, or what
   another op of the same head gives. Types, shapes, arithmetic and what the proof asks for are told by them.
2. A *part* is read by ops of the same head alone; all else is a value of the captured step.
3. Arithmetic is counted in products of N x D, D x V. Rooflines and ``FlopCounterMode`` ask: without it an op of three
   products would count as its traffic alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ebbtide.rewrites.heads.slices import Operands, loss_of
from ebbtide.step.op_traits import NAMESPACE, OpTraits, declare_op
from ebbtide.torch_seams.dispatcher import OpOverload, flop_registry, register_flop_formula

__all__ = ["HEAD_OPS", "PARTS", "HeadOp", "declare", "op_of"]

PARTS = frozenset({"statistics", "hidden", "known", "kept"})
"""Parts (definition 2); ``hidden`` and ``known`` are made by a guess."""
_OPERANDS = ("h", "wt", "bias")
_LOSS = ("labels", "reduction", "ignore_index", "cut", "logit_ops")
_TYPES = {
    **dict.fromkeys(("bias", "numbers", "guess"), "Tensor?"),
    **dict.fromkeys(("reduction", "ignore_index", "rows", "columns", "count"), "SymInt"),
    **dict.fromkeys(("smoothed", "trains"), "bool"),
    "cut": "SymInt[]",
    "logit_ops": "str",
    "dtype": "ScalarType",
}
"""Types in a schema, of arguments that are no ``Tensor``."""


@dataclass(frozen=True)
class HeadOp:
    """One of them.

    Attributes:
        name: in :data:`NAMESPACE`.
        arguments: their names, in order.
        gives: the names of its results, in order.
        products: how many products of the head's size a call makes, by its arguments; a guess is counted as right.
        writes: arguments that it writes over.
        may_take_more: whether some runs need more workspace than others.
    """

    name: str
    arguments: tuple[str, ...]
    gives: tuple[str, ...]
    products: Callable[[Mapping[str, Any]], float]
    writes: frozenset[str] = frozenset()
    may_take_more: bool = False

    @property
    def target(self) -> OpOverload:
        """What a graph calls."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default

    def by_name(self, args: Iterable[Any]) -> dict[str, Any]:
        """The arguments of a call by their names."""
        return dict(zip(self.arguments, args, strict=True))

    def flops(self, *args: Any, out_val: object = None) -> int:
        """Arithmetic of a call (definition 3)."""
        given = self.by_name(args)
        return round(2 * given["h"].numel() * given["wt"].shape[1] * self.products(given))

    def without_numbers(self, *args: Any) -> Any:
        """What a call gives, without its numbers."""
        given = self.by_name(args)
        made = [_empty(each, given) for each in self.gives]
        return tuple(made) if len(made) > 1 else made[0]


HEAD_OPS: dict[str, HeadOp] = {}
"""By their names."""
_by_target: dict[object, HeadOp] = {}


def op_of(target: object) -> HeadOp | None:
    """The op whose overload ``target`` is; ``None`` if it is none of a head."""
    return _by_target.get(target)


def declare(
    arguments: str,
    gives: str,
    products: Callable[[Mapping[str, Any]], float],
    *,
    writes: str = "",
    may_take_more: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the kernel of a new op of its name, as ``HeadOp`` has it.

    It is called with the operands, with what its loss is made of, and with all other arguments by their names.
    """

    def declared(kernel: Callable[..., Any]) -> Callable[..., Any]:
        op = HeadOp(
            kernel.__name__,
            tuple(arguments.split()),
            tuple(gives.split()),
            products,
            frozenset(writes.split()),
            may_take_more,
        )
        types = ", ".join(f"{_TYPES.get(each, 'Tensor')} {each}" for each in op.arguments)
        results = "Tensor" if len(op.gives) == 1 else f"({', '.join('Tensor' for _ in op.gives)})"

        def run(*args: Any) -> Any:
            given = op.by_name(args)
            x = Operands(*(given.pop(each) for each in _OPERANDS))
            return kernel(x, loss_of(x.h.shape[0], *(given.pop(each) for each in _LOSS)), **given)

        made = torch.library.custom_op(
            f"{NAMESPACE}::{op.name}", run, mutates_args=(), schema=f"({types}) -> {results}"
        )
        made.register_fake(op.without_numbers)
        HEAD_OPS[op.name] = _by_target[op.target] = op
        declare_op(op.name, OpTraits(op.writes, small=frozenset({"h"}), may_take_more=may_take_more))
        if op.target.overloadpacket not in flop_registry:
            register_flop_formula(op.target.overloadpacket, get_raw=True)(op.flops)
        return kernel

    return declared


def _empty(name: str, given: Mapping[str, Any]) -> Tensor:
    """The result ``name`` of a call with these arguments, without its numbers."""
    h, wt, labels = given["h"], given["wt"], given["labels"]
    trains, sums = given.get("trains", True), given["bias"] is not None
    shapes: dict[str, tuple[int, ...]] = {
        "loss": () if given["reduction"] else (labels.shape[0],),
        "total_weight": (),
        "statistics": (3, h.shape[0]),
        "row_sums": (labels.shape[0] if given.get("smoothed") else 0,),
        "hidden": (0,) if given.get("guess") is None else tuple(h.shape),
        "known": (h.shape[0], given.get("count", 0)),
        "kept": (h.shape[0], wt.shape[1]),
        "hidden_gradient": tuple(h.shape),
        "weight_gradient": (wt.shape[1], h.shape[1]) if trains else (0,),
        "bias_gradient": (1, wt.shape[1]) if trains and sums else (0,),
    }
    of_softmax = name in ("loss", "total_weight", "statistics", "row_sums")
    return h.new_empty(shapes[name], dtype=given["dtype"] if of_softmax else h.dtype)
