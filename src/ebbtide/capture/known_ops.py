"""Ops of a step that has been read, for another graph that is its copy but for a rewrite: most nodes are the same.

A node is taken for the one of its name where it has its target and its very value, and is called with the very values
that that one is called with. Copies of a graph share the values of their nodes, and a rewrite that changes a value, or
what a node is called with, gives it values of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from ebbtide.cost.call import Call
from ebbtide.step.program import Op

__all__ = ["KnownOps"]


class KnownOps:
    """What was read of nodes that are ops.

    Args:
        read: of each, the node, its op and its call.
    """

    def __init__(self, read: Iterable[tuple[fx.Node, Op, Call]]) -> None:
        self._read = {node.name: (node, op, call) for node, op, call in read}

    def look_up(self, node: fx.Node) -> tuple[Op, Call] | None:
        """The op and call of the node that ``node`` is a copy of; ``None`` if it is none."""
        if (found := self._read.get(node.name)) is None:
            return None
        old, op, call = found
        same = node.target is old.target and node.meta["val"] is old.meta["val"] and _given_to(node) == _given_to(old)
        return (op, call) if same else None


class _Value:
    """A value, equal to itself alone: fake tensors compare their elements."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Value) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _given_to(node: fx.Node) -> Any:
    """Arguments of ``node``, other nodes by their values."""
    given: Any = (node.args, node.kwargs)
    return fx.map_arg(given, lambda each: _Value(each.meta["val"]))  # type: ignore[arg-type, return-value]
