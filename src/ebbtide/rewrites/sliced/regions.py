"""Regions of large values: how one is found, from the product that opens it, along what is read and who reads.

1. A *region* is a set of values of one large shape: what *opening* products make of narrower operands, and what ops
   that make each number of those in its place make of each other. All of them are read in it, by such ops and by
   *closing* products and sums, each of which can be made in slices along some axis of it (``sliced.axes``).
2. It is *late* what depends on a tangent, and *early* the rest.
3. Nodes are seen through views that keep the order of elements, or swap the last two dimensions.
4. What looks alike and is none is *left*, with the reason.

Which products open one and what else it has to have, each kind of region says for itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.capture.origin import module_of, source_of
from ebbtide.rewrites.graphs import after_tangents
from ebbtide.rewrites.once import once
from ebbtide.rewrites.rule import NoPlace, Skipped, require
from ebbtide.rewrites.sliced.axes import Axis, can_be_cut, is_product, result_cut, swapped_cut
from ebbtide.rewrites.views import readers, seen
from ebbtide.torch_seams.graphs import arguments_of

__all__ = ["Growth", "Region", "bytes_of", "find_regions"]


@dataclass(frozen=True)
class Region:
    """A region (definition 1), as nodes of the joint graph in its order.

    Attributes:
        members: ops that make the large values.
        results: what is made of them, early ones apart from late ones, each with the axis along which it can be cut.
        bytes_at_once: the most that one op reads and makes of it.
    """

    members: tuple[fx.Node, ...]
    results: tuple[tuple[Axis, tuple[fx.Node, ...]], ...]
    bytes_at_once: int

    @property
    def at(self) -> str:
        """The name by which it is found again."""
        return self.members[0].name

    @property
    def where(self) -> str:
        """For people: the module of its first result, or its line."""
        first = self.results[0][1][0]
        return module_of(first) or source_of(first)

    @property
    def axes(self) -> dict[str, Axis]:
        """Those of its results, by their names."""
        return {axis.name: axis for axis, _ in self.results}


class Growth:
    """A region that grows from ``first``, its opening product; a subclass says what kind of region.

    Attributes:
        members: ops that make the large values.
        closing: for each of :attr:`axes`, what is made of them along it.
    """

    rank: ClassVar[int]
    """How many dimensions large values have."""
    axes: ClassVar[tuple[str, ...]]
    """Names of the dimensions, from the first one on, along which its results may be cut."""
    whole: ClassVar[str]
    """What stays whole where there is none, for people."""

    def __init__(self, first: fx.Node) -> None:
        self.shape = tuple(first.meta["val"].shape)
        self.members: set[fx.Node] = set()
        self.closing: dict[str, set[fx.Node]] = {name: set() for name in self.axes}
        self._pending = [first]
        self._why: NoPlace | None = None

    # -- what a kind of region says -------------------------------------------------------------------------------

    @classmethod
    def opens(cls, node: fx.Node) -> bool:
        """Whether a region of the forward may begin at ``node``."""
        raise NotImplementedError

    def makes(self, node: fx.Node) -> bool:
        """Whether ``node`` is a product whose result may be in the region."""
        raise NotImplementedError

    def made_of(self, node: fx.Node) -> Iterable[fx.Node]:
        """What ``node``, which keeps places, reads and that has to be in the region too."""
        raise NotImplementedError

    def looks_like_one(self, early: Iterable[fx.Node]) -> bool:
        """Whether people would call it one, so that they are told why it is none."""
        raise NotImplementedError

    def check(self, late: frozenset[fx.Node]) -> None:
        """Raise unless the region has all that its kind has to have."""
        raise NotImplementedError

    def leading(self, name: str) -> tuple[int, ...]:
        """The dimensions that an axis stands for."""
        return (self.shape[self.axes.index(name)],)

    # -- how it grows ---------------------------------------------------------------------------------------------

    @classmethod
    def keeps_places(cls, node: fx.Node) -> bool:
        """Whether ``node`` makes each number of those in its place, along all axes."""
        return node.op == "call_function" and all(can_be_cut(node, dim, cls.rank) for dim in range(len(cls.axes)))

    def is_large(self, node: fx.Node) -> bool:
        """Whether it has as many numbers as the region's values, and their last dimensions."""
        value, kept = node.meta.get("val"), self.rank - 1
        return (
            isinstance(value, torch.Tensor)
            and tuple(value.shape[-kept:]) == self.shape[-kept:]
            and value.numel() == math.prod(self.shape)
        )

    def grow(self) -> None:
        """All of it; beyond what cannot be in one, nothing."""
        while self._pending:
            node = self._pending.pop()
            if node in self.members:
                continue
            try:
                self._take(node)
            except NoPlace as error:
                self._why = self._why or error
                continue
            self.members.add(node)
            self._pending += self.made_of(node) if self.keeps_places(node) else ()
            for user, read in readers(node, swapped=True):
                try:
                    self._read(user, read, node)
                except NoPlace as error:
                    self._why = self._why or error

    def _take(self, node: fx.Node) -> None:
        """Raise unless ``node`` may be a member."""
        known = self.makes(node) or self.keeps_places(node)
        require(known, f"{node.name} ({node.target}) is read with them")
        require(self.is_large(node), f"{node.name} ({node.target}) has another shape")
        require(node.meta["val"].is_contiguous(), f"{node.name} has another layout")

    def _read(self, user: fx.Node, read: fx.Node, node: fx.Node) -> None:
        """Take up ``user``, who reads ``node`` as ``read``."""
        what = ("they are returned" if user.op == "output" else f"{user.target} reads them") + _at_source(user)
        require(user.op != "output", what)
        made, swapped = seen(read, self.rank)
        require(made is node, f"{what} in another shape")
        if self.keeps_places(user):
            require(self.is_large(user), f"{what} with something larger")
            require(not swapped, f"{what} transposed")
            self._pending.append(user)
            return
        require(is_product(user), what)
        positions = [position for position, each in enumerate(arguments_of(user)) if each is read]
        operands = len([each for each in arguments_of(user) if isinstance(each, fx.Node)])
        require(len(positions) == 1 and positions[0] >= operands - 2, f"{what} twice, or adds to what it sums")
        for dim, name in enumerate(self.axes):
            along = swapped_cut(dim, self.rank) if swapped else dim
            if result_cut(user, positions[0], along, self.rank) is not None:
                self.closing[name].add(user)
                return
        raise NoPlace(what)

    def region(self, order: dict[fx.Node, int], late: frozenset[fx.Node]) -> Region:
        """What has grown; raises :class:`NoPlace` where something in it has been in the way."""
        if self._why is not None:
            raise self._why
        self.check(late)
        results: list[tuple[Axis, tuple[fx.Node, ...]]] = []
        for dim, (name, closing) in enumerate(self.closing.items()):
            leading = self.leading(name)
            axis = Axis(name, dim, self.rank, leading, even=self.rank == 2)
            for nodes in (closing - late, closing & late):
                if nodes:
                    results.append((axis, tuple(sorted(nodes, key=order.__getitem__))))
        large = [sum(map(bytes_of, {each, *self._large_arguments(each)})) for each in self.members]
        return Region(tuple(sorted(self.members, key=order.__getitem__)), tuple(results), max(large))

    def _large_arguments(self, node: fx.Node) -> Iterator[fx.Node]:
        """What makes the large values that ``node`` reads, which is no product."""
        for each in node.all_input_nodes if self.keeps_places(node) else ():
            if self.is_large(each):
                yield seen(each, self.rank)[0]


@once
def find_regions(captured: Captured, kind: type[Growth]) -> tuple[list[Region], list[Skipped]]:
    """All regions of one kind in a step, and what is left as it is though it looks like one."""
    order = {node: index for index, node in enumerate(captured.graph.nodes)}
    late = after_tangents(captured.graph)
    regions: list[Region] = []
    left: dict[str, Skipped] = {}
    done: set[fx.Node] = set()
    for node in captured.op_nodes:
        if node in done or node in late or node.op != "call_function" or not kind.opens(node):
            continue
        growth = kind(node)
        growth.grow()
        done |= growth.members
        try:
            regions.append(growth.region(order, late))
        except NoPlace as error:
            if growth.looks_like_one(growth.closing[kind.axes[0]] - late):
                source = source_of(node)
                left.setdefault(source, Skipped(source, f"{kind.whole}: {error}"))
    return regions, list(left.values())


def _at_source(node: fx.Node) -> str:
    """The line that made it, to follow a sentence; empty where it is not known."""
    return f" at {source_of(node)}" if source_of(node) else ""


def bytes_of(node: fx.Node) -> int:
    """Bytes of the numbers of a node's value."""
    value: Any = node.meta["val"]
    return value.numel() * value.element_size()
