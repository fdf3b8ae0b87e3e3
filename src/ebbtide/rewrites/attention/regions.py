"""Where a step computes attention by products and a softmax: scores of every pair of tokens, and who reads them.

1. An *entry* is one head of one sequence. *Square* values have a number for every query and key of every entry: [G, T,
   S], or with more dimensions in the place of G.
2. A *region* is a set of square values: what *opening* products of batches make of narrower operands, and what
   elementwise ops and softmaxes over the keys make of each other. All of them are read in it, by such ops and by
   *closing* products of batches. No op in it mixes entries.
3. What it reads besides is *given*: masks, which may be smaller, and square values that are not made of its products,
   such as what dropout has drawn.
4. It is *late* what depends on a tangent, and *early* the rest.
5. What looks alike and is none is *left*, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.capture.origin import module_of, source_of
from ebbtide.rewrites.once import once
from ebbtide.rewrites.rule import Left
from ebbtide.rewrites.sliced.elementwise import is_elementwise
from ebbtide.rewrites.sliced.growth import Growth, at_source, bytes_of, grown, require
from ebbtide.rewrites.views import is_same_order, is_swap, seen
from ebbtide.torch_seams.graphs import arguments_of

__all__ = ["BATCHED", "SOFTMAXES", "Attention", "find_attention", "is_row_op", "square_arguments"]

_aten = torch.ops.aten
BATCHED = frozenset({_aten.bmm.default, _aten.baddbmm.default})
SOFTMAXES: dict[object, int] = {
    _aten._softmax.default: 1,
    _aten._safe_softmax.default: 1,
    _aten._softmax_backward_data.default: 2,
}
"""And the position of the dimension."""


@dataclass(frozen=True)
class Attention:
    """Definition 2, as nodes of the joint graph in its order.

    Attributes:
        leading: the dimensions of square values before the last two.
        members: ops that make square values.
        closing: products that read them, early ones first.
        late: the members and closing products that depend on a tangent.
    """

    leading: tuple[int, ...]
    members: tuple[fx.Node, ...]
    closing: tuple[fx.Node, ...]
    late: frozenset[fx.Node]

    @property
    def entries(self) -> int:
        """G."""
        return math.prod(self.leading)

    @property
    def at(self) -> str:
        """The name by which it is found again."""
        return self.members[0].name

    @property
    def where(self) -> str:
        """For people: the module of its first closing product, or its line."""
        return module_of(self.closing[0]) or source_of(self.closing[0])

    @property
    def bytes_at_once(self) -> int:
        """The most that one elementwise op or softmax reads and makes of it."""
        ops = [each for each in self.members if each.target not in BATCHED]
        return max(sum(map(bytes_of, {each, *square_arguments(each)})) for each in ops)


def is_row_op(node: fx.Node) -> bool:
    """Whether each row of its result, along the last dimension, is made of those in its place."""
    if is_elementwise(node):
        return True
    if (position := SOFTMAXES.get(node.target)) is None:
        return False
    arguments = arguments_of(node)
    dims = node.meta["val"].dim()
    changes_type = node.target is _aten._softmax.default and arguments[2] is True
    return arguments[position] % dims == dims - 1 and not changes_type


def square_arguments(node: fx.Node) -> list[fx.Node]:
    """What made the values of its own size that an elementwise op or a softmax reads."""
    size = node.meta["val"].numel()
    return [seen(each)[0] for each in node.all_input_nodes if each.meta["val"].numel() == size]


@once
def find_attention(captured: Captured) -> tuple[list[Attention], list[Left]]:
    """All regions of a step, and what is left as it is though it looks like one."""
    return grown(captured, _opens, _Growth, "scores of an attention stay whole")


def _opens(node: fx.Node) -> bool:
    """Whether it is a product that sums over less than it makes, for more entries than one."""
    if node.op != "call_function" or node.target not in BATCHED:
        return False
    entries, rows, columns = node.meta["val"].shape
    return entries > 1 and arguments_of(node)[-2].meta["val"].shape[2] < max(rows, columns)


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Who reads the numbers of ``node``, and as which node."""
    for user in node.users:
        if is_same_order(user) or is_swap(user):
            yield from _readers(user)
        else:
            yield user, node


class _Growth(Growth[Attention]):
    """A region that grows from one opening product."""

    def __init__(self, first: fx.Node) -> None:
        super().__init__(first)
        self.shape = tuple(first.meta["val"].shape)

    def made_of(self, node: fx.Node) -> list[fx.Node]:
        """Square values that are made of products, as these are."""
        if not is_row_op(node):
            return []
        return [each for each in square_arguments(node) if self._may_be_member(each)]

    def readers(self, node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Through views that keep the order, or swap the last two dimensions."""
        return _readers(node)

    def looks_like_one(self, late: frozenset[fx.Node]) -> bool:
        """Whether there is a softmax."""
        return any(each.target in SOFTMAXES for each in self.members)

    def _may_be_member(self, node: fx.Node) -> bool:
        """Definition 3: of what else it reads, the opening products and what is made of square values."""
        if node.op != "call_function" or not self._is_square(node):
            return False
        if node.target in BATCHED:
            return True
        return is_row_op(node) and self._is_of_products(node)

    def _is_of_products(self, node: fx.Node) -> bool:
        """Whether some product of batches is behind ``node``, through square values alone."""
        pending, known = [node], {node}
        while pending:
            each = pending.pop()
            if each in self.members or each.target in BATCHED:
                return True
            new = set(square_arguments(each)) - known if each.op == "call_function" and is_row_op(each) else set()
            pending += new
            known |= new
        return False

    def _is_square(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return (
            isinstance(value, torch.Tensor)
            and value.dim() >= 3
            and tuple(value.shape[-2:]) == self.shape[-2:]
            and value.numel() == math.prod(self.shape)
        )

    def check(self, node: fx.Node) -> None:
        """A product of batches, an elementwise op or a softmax, as large as the rest."""
        require(self._is_square(node), f"{node.name} ({node.target}) has another shape")
        require(node.meta["val"].is_contiguous(), f"{node.name} has another layout")
        product = node.target in BATCHED
        require(product or is_row_op(node), f"{node.target} reads them" + at_source(node))

    def reader(self, user: fx.Node, read: fx.Node, node: fx.Node) -> None:
        """A closing product, or another member."""
        what = ("they are returned" if user.op == "output" else f"{user.target} reads them") + at_source(user)
        made, swapped = seen(read)
        require(user.op != "output", what)
        require(made is node, f"{what} in another shape")
        if user.target in BATCHED:
            require(user.target is _aten.bmm.default, f"{what} and adds to what it sums")
            self.closing.add(user)
            return
        require(is_row_op(user), what)
        require(self._is_square(user), f"{what} with something larger")
        require(not swapped, f"{what} transposed")
        self.pending.append(user)

    def made(self, order: Mapping[fx.Node, int], late: frozenset[fx.Node]) -> Attention:
        """By definition 2."""

        def sort(nodes: set[fx.Node]) -> tuple[fx.Node, ...]:
            return tuple(sorted(nodes, key=order.__getitem__))

        require(any(each.target in SOFTMAXES for each in self.members), "there is no softmax over the keys")
        products = [each for each in self.members if each.target in BATCHED]
        chained = any(seen(read)[0] in self.members for each in products for read in each.all_input_nodes)
        require(not chained, "a product reads them and makes more of them")
        early = self.closing - late
        require(bool(early), "no product reads them in the forward")
        leading = {tuple(each.meta["val"].shape[:-2]) for each in self.members}
        flat = self.shape[:1]
        require(len(leading - {flat}) <= 1, "they have several shapes")
        members = sort(self.members)
        closing = (*sort(early), *sort(self.closing & late))
        (shape,) = (leading - {flat}) or {flat}
        return Attention(shape, members, closing, late & (self.members | self.closing))
