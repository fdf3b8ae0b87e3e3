"""Views that a rewrite sees through: the same numbers in the same order, or with the last two dimensions swapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ebbtide.torch_seams.graphs import arguments_of

__all__ = ["SAME_ORDER", "is_same_order", "is_swap", "made_by", "readers", "seen", "seen_through", "swaps"]

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


def is_same_order(node: fx.Node) -> bool:
    """Whether it gives the numbers of what it is a view of, in their order."""
    if node.target is _aten.expand.default:
        return node.meta["val"].shape == arguments_of(node)[0].meta["val"].shape
    return node.target in SAME_ORDER


def seen_through(node: Any) -> Any:
    """What makes the numbers of ``node``, if that is a node, in their order."""
    while isinstance(node, fx.Node) and is_same_order(node):
        node = arguments_of(node)[0]
    return node


def readers(node: fx.Node, *, swapped: bool = False) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Who reads the numbers of ``node``, and as which node: in their order, or ``swapped`` too."""
    for user in node.users:
        if is_same_order(user) or (swapped and is_swap(user)):
            yield from readers(user, swapped=swapped)
        else:
            yield user, node


def is_swap(node: fx.Node) -> bool:
    """Whether it is a view with the last two dimensions swapped."""
    if node.target is _aten.t.default:
        return node.meta["val"].dim() == 2
    if node.target is not _aten.transpose.int:
        return False
    dims = node.meta["val"].dim()
    return sorted(each % dims for each in arguments_of(node)[1:]) == [dims - 2, dims - 1]


def swaps(node: fx.Node, rank: int) -> bool | None:
    """Whether ``node`` is a view with the last two dimensions swapped; ``None`` where nothing is seen through it.

    A view that keeps the order keeps all dimensions of the last ``rank`` but the first.
    """
    if is_swap(node) and (rank > 2 or node.meta["val"].dim() == rank):
        return True
    kept = is_same_order(node) and _last(node, rank) == _last(arguments_of(node)[0], rank)
    return False if kept else None


def seen(node: fx.Node, rank: int) -> tuple[fx.Node, bool]:
    """What makes the numbers of ``node``, and whether they are read with the last two dimensions swapped."""
    swapped = False
    while (turned := swaps(node, rank)) is not None:
        swapped ^= turned
        node = arguments_of(node)[0]
    return node, swapped


def made_by(node: fx.Node) -> fx.Node:
    """What makes the numbers of ``node``, in whatever order it has them."""
    while is_same_order(node) or is_swap(node):
        node = arguments_of(node)[0]
    return node


def _last(node: fx.Node, rank: int) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape[1 - rank :])
