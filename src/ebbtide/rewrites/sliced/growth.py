"""How a region is found: from the product that opens it, along what is read and who reads, until nothing is missing.

A *region* is a set of values that are large together and of use only to each other, but for what *closing* products
make of them. Which ops may make such values, and who may read them, each kind of region says for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.capture.origin import source_of
from ebbtide.rewrites.rule import Left
from ebbtide.torch_seams.aot import is_tangent

__all__ = ["Growth", "NoRegion", "after_tangents", "at_source", "bytes_of", "grown", "require"]

_Region = TypeVar("_Region")


class NoRegion(Exception):
    """It is no region."""


def require(holds: bool, why: str) -> None:
    """Raise :class:`NoRegion` unless ``holds``."""
    if not holds:
        raise NoRegion(why)


class Growth(Generic[_Region]):
    """What grows from ``first``.

    Attributes:
        members: ops that make the large values.
        closing: products that read them and make none.
    """

    def __init__(self, first: fx.Node) -> None:
        self.members: set[fx.Node] = set()
        self.closing: set[fx.Node] = set()
        self.pending = [first]
        self._why: NoRegion | None = None

    # -- what a kind of region says -------------------------------------------------------------------------------

    def check(self, node: fx.Node) -> None:
        """Raise unless ``node`` may be a member."""
        raise NotImplementedError

    def made_of(self, node: fx.Node) -> Iterable[fx.Node]:
        """What ``node``, a member, reads and that has to be a member too."""
        raise NotImplementedError

    def readers(self, node: fx.Node) -> Iterable[tuple[fx.Node, fx.Node]]:
        """Who reads the numbers of ``node``, and as which node."""
        raise NotImplementedError

    def reader(self, user: fx.Node, read: fx.Node, node: fx.Node) -> None:
        """Take up ``user``, who reads ``node`` as ``read``; raise if it may not."""
        raise NotImplementedError

    def looks_like_one(self, late: frozenset[fx.Node]) -> bool:
        """Whether people would call it one, so that they are told why it is none."""
        raise NotImplementedError

    def made(self, order: Mapping[fx.Node, int], late: frozenset[fx.Node]) -> _Region:
        """The region; raises :class:`NoRegion`."""
        raise NotImplementedError

    # -- how it grows ---------------------------------------------------------------------------------------------

    def grow(self) -> None:
        """All of it; beyond what cannot be in one, nothing."""
        while self.pending:
            node = self.pending.pop()
            if node in self.members:
                continue
            try:
                self.check(node)
            except NoRegion as error:
                self._why = self._why or error
                continue
            self.members.add(node)
            self.pending += self.made_of(node)
            for user, read in self.readers(node):
                try:
                    self.reader(user, read, node)
                except NoRegion as error:
                    self._why = self._why or error

    def region(self, order: Mapping[fx.Node, int], late: frozenset[fx.Node]) -> _Region:
        """What has grown; raises :class:`NoRegion` where something in it has been in the way."""
        if self._why is not None:
            raise self._why
        return self.made(order, late)


def grown(
    captured: Captured, opens: Callable[[fx.Node], bool], kind: Callable[[fx.Node], Growth[_Region]], what: str
) -> tuple[list[_Region], list[Left]]:
    """All regions of a step, and what is left as it is though it looks like one.

    Args:
        captured: the step.
        opens: whether a region of its forward may begin at a node.
        kind: of growth.
        what: stays whole where there is none, for people.
    """
    order = {node: index for index, node in enumerate(captured.graph.nodes)}
    late = after_tangents(captured.graph)
    regions: list[_Region] = []
    left: dict[str, Left] = {}
    done: set[fx.Node] = set()
    for node in captured.op_nodes:
        if node in done or node in late or not opens(node):
            continue
        growth = kind(node)
        growth.grow()
        done |= growth.members
        try:
            regions.append(growth.region(order, late))
        except NoRegion as error:
            if growth.looks_like_one(late):
                source = source_of(node)
                left.setdefault(source, Left(source, f"{what}: {error}"))
    return regions, list(left.values())


def after_tangents(graph: fx.Graph) -> frozenset[fx.Node]:
    """All nodes that depend on a tangent."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and is_tangent(node)
        if tangent or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def at_source(node: fx.Node) -> str:
    """The line that made it, to follow a sentence; empty where it is not known."""
    return f" at {source_of(node)}" if source_of(node) else ""


def bytes_of(node: fx.Node) -> int:
    """Of the numbers of a node's value."""
    value: Any = node.meta["val"]
    return value.numel() * value.element_size()
