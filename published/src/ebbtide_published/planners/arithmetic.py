"""Which ops are heavy arithmetic: PyTorch's own by their names, those of published graphs by their costs.

What the planners that sort ops into heavy and cheap ones (``min_cut``, ``echo``) share; each has lists of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from ebbtide.step.program import Op, Program

__all__ = ["aten_name", "has_aten_ops", "heavy_by_cost", "is_foreign"]


def is_foreign(op: Op) -> bool:
    """Whether it is none of PyTorch's own ops."""
    return op.target.partition(".")[0] not in ("aten", "prims")


def aten_name(op: Op) -> str:
    """The name between namespace and overload; ``""`` for foreign ops."""
    return "" if is_foreign(op) else op.target.split(".")[1]


def has_aten_ops(program: Program) -> bool:
    """Whether names say anything: false for published graphs."""
    return any(op.target.startswith("aten.") for op in program.ops)


def heavy_by_cost(program: Program) -> Callable[[Op], bool]:
    """Whether an op takes more seconds per byte that it reads and makes than the forward as a whole."""

    def moved(op: Op) -> int:
        return sum(program.buffers[b].bytes for b in (*op.inputs, *op.outputs))

    forward = program.ops[: program.boundary]
    seconds, total = sum(op.seconds for op in forward), sum(map(moved, forward))
    return lambda op: op.seconds * total > seconds * moved(op)
