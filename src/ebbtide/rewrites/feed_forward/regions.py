"""Where a step is wide: what a feed-forward layer makes between its linear layers, and who reads it.

1. A *region* is a set of values of N rows and H columns: what *opening* products make of narrower operands, and what
   elementwise ops make of each other. All of them are read in it, by elementwise ops, by *closing* products, which sum
   over H, by the products that make the gradients of weights, which sum over N, and by sums over N.
2. It is *early* what depends on no tangent, and *late* the rest; the forward's hidden values are read by the late ones.
3. Nodes are seen through views that keep the order of elements: they name the same numbers.
4. What looks alike and is none is *left*, with the reason: nothing is said where no elementwise op reads the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.capture.origin import module_of, source_of
from ebbtide.rewrites.once import once
from ebbtide.rewrites.rule import Left
from ebbtide.rewrites.sliced.elementwise import is_elementwise
from ebbtide.rewrites.sliced.growth import Growth, NoRegion, at_source, bytes_of, grown, require
from ebbtide.rewrites.views import SAME_ORDER
from ebbtide.torch_seams.graphs import arguments_of

__all__ = [
    "PRODUCTS",
    "Region",
    "find_regions",
    "is_flip",
    "is_sum_of_rows",
    "seen_through",
]

_aten = torch.ops.aten
PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})


@dataclass(frozen=True)
class Region:
    """Definition 1, as nodes of the joint graph in its order.

    Attributes:
        rows: N.
        columns: H.
        members: ops that make the wide values.
        closing: products that sum over H, early ones first.
        late: the members and closing products that depend on a tangent.
        weights: products that make gradients of weights, and sums over N that make those of biases.
    """

    rows: int
    columns: int
    members: tuple[fx.Node, ...]
    closing: tuple[fx.Node, ...]
    late: frozenset[fx.Node]
    weights: tuple[fx.Node, ...]

    @property
    def at(self) -> str:
        """The name by which it is found again."""
        return self.members[0].name

    @property
    def where(self) -> str:
        """For people: the module of its first closing product without its last name, or its line."""
        return module_of(self.closing[0]) or source_of(self.closing[0])

    @property
    def bytes_at_once(self) -> int:
        """The most that one elementwise op reads and makes of it."""
        return max(sum(map(bytes_of, {each, *wide_arguments(each)})) for each in self.members)


def seen_through(node: Any) -> Any:
    """Definition 3, towards what makes the numbers."""
    while isinstance(node, fx.Node) and node.target in SAME_ORDER:
        node = arguments_of(node)[0]
    return node


def wide_arguments(node: fx.Node) -> list[fx.Node]:
    """The tensors that an elementwise op reads, but numbers, seen through views; none of another op."""
    if not is_elementwise(node):
        return []
    return [seen_through(each) for each in node.all_input_nodes if each.meta["val"].dim()]


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Who reads the numbers of ``node``, and as which node."""
    for user in node.users:
        if user.target in SAME_ORDER:
            yield from _readers(user)
        else:
            yield user, node


def is_sum_of_rows(node: fx.Node) -> bool:
    """Whether it sums over the first of two dimensions, which stays, and changes no type."""
    return (
        node.target is _aten.sum.dim_IntList
        and list(arguments_of(node)[1]) == [0]
        and node.meta["val"].dim() == 2
        and node.meta["val"].dtype == arguments_of(node)[0].meta["val"].dtype
    )


def is_flip(node: fx.Node) -> bool:
    """Whether it is a transposed view of two dimensions."""
    return node.target is _aten.t.default and node.meta["val"].dim() == 2


@once
def find_regions(captured: Captured) -> tuple[list[Region], list[Left]]:
    """All regions of a step, and what is left as it is though it looks like one."""
    return grown(captured, _opens, _Growth, "hidden values of a feed-forward layer stay whole")


def _opens(node: fx.Node) -> bool:
    """Whether it is a product that makes more columns than it reads."""
    if node.op != "call_function" or node.target not in PRODUCTS or node.kwargs:
        return False
    rows = arguments_of(node)[-2].meta["val"]
    return node.meta["val"].shape[1] > rows.shape[1]


class _Growth(Growth[Region]):
    """A region that grows from one opening product.

    Attributes:
        weights: products that make gradients of weights, and sums over N.
    """

    def __init__(self, first: fx.Node) -> None:
        super().__init__(first)
        rows, columns = first.meta["val"].shape
        self.shape: tuple[int, int] = rows, columns
        self.weights: set[fx.Node] = set()

    def made_of(self, node: fx.Node) -> list[fx.Node]:
        """All that an elementwise op reads."""
        return wide_arguments(node)

    def readers(self, node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Through views that keep the order."""
        return _readers(node)

    def looks_like_one(self, late: frozenset[fx.Node]) -> bool:
        """Whether a linear layer reads what elementwise ops make of the product."""
        return any(map(is_elementwise, self.members)) and bool(self.closing - late)

    def check(self, node: fx.Node) -> None:
        """An opening product or an elementwise op, as large as the rest."""
        value = node.meta.get("val")
        require(
            node.op == "call_function" and isinstance(value, torch.Tensor) and (_opens(node) or is_elementwise(node)),
            f"{node.name} ({node.target}) is read with them",
        )
        assert isinstance(value, torch.Tensor)
        rows, columns = self.shape
        same = value.dim() > 0 and value.shape[-1] == columns and value.numel() == rows * columns
        require(same and value.is_contiguous(), f"{node.name} has another layout")

    def reader(self, user: fx.Node, read: fx.Node, node: fx.Node) -> None:
        """A closing product, one that makes a gradient of a weight, a sum over N, or another member."""
        if is_elementwise(user):
            self.pending.append(user)
        elif user.target in PRODUCTS and not user.kwargs:
            *_, one, other = arguments_of(user)
            require((one is read) != (other is read) and read.meta["val"].dim() == 2, f"{user.name} reads them twice")
            if one is read:
                self.closing.add(user)
            else:
                require(user.target is _aten.mm.default, f"{user.name} adds to a sum over them")
                self.weights.add(user)
        elif is_flip(user):
            for reader, _ in _readers(user):
                first = reader.target is _aten.mm.default and arguments_of(reader)[0] is user
                require(first and arguments_of(reader)[1] is not user, f"{reader.target} reads them transposed")
                self.weights.add(reader)
        elif is_sum_of_rows(user):
            self.weights.add(user)
        else:
            what = "they are returned" if user.op == "output" else f"{user.target} reads them"
            raise NoRegion(what + at_source(user))

    def made(self, order: Mapping[fx.Node, int], late: frozenset[fx.Node]) -> Region:
        """By definition 1."""

        def sort(nodes: set[fx.Node]) -> tuple[fx.Node, ...]:
            return tuple(sorted(nodes, key=order.__getitem__))

        require(any(map(is_elementwise, self.members)), "nothing is made of them")
        require(bool(self.closing - late), "no linear layer reads them alone")
        require(bool(self.members & late), "nothing of it is trained")
        require(self.weights <= late, "a product sums over their rows")
        dtypes = {each.meta["val"].is_floating_point() or each.meta["val"].dtype is torch.bool for each in self.members}
        require(dtypes == {True}, "some of them are no numbers")
        members, closing = sort(self.members), sort(self.closing)
        rows, columns = self.shape
        return Region(rows, columns, members, closing, late & (self.members | self.closing), sort(self.weights))
