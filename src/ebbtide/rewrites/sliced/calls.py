"""A few ops as one call that makes its results in slices, and how the graph of one slice is written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

__all__ = ["InSlices", "SliceWriter", "Tile"]


class InSlices:
    """The target of such a call: ``target(size, *tensors)`` returns a tuple.

    Args:
        graph: of one slice: an input for each tensor, and a tuple of outputs.
        name: by which generated code calls it.
        text: its name, which says all that it does and is the same in every process and for every size.
    """

    borrows = True
    """Nothing that it is given is written to (``cost.room``)."""

    def __init__(self, graph: fx.Graph, name: str, text: str) -> None:
        self.__name__ = name
        self.graph = graph
        self._text = text

    def __call__(self, size: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The results, made in slices of ``size``."""
        raise NotImplementedError

    @cached_property
    def run(self) -> Callable[..., Any]:
        """The graph, compiled: most calls are looked at, and few are made."""
        return fx.GraphModule(torch.nn.Module(), self.graph).forward

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


@dataclass(frozen=True)
class Tile:
    """One call, and what it takes the place of.

    Attributes:
        axis: along which its slices lie.
        results: captured nodes, in order.
        parts: captured ops that it runs, in order, results among them.
        given: captured nodes that it reads.
        cuts: of ``given``, the dimension that is cut, ``None`` where it is whole.
        target: what is called.
    """

    axis: str
    results: tuple[fx.Node, ...]
    parts: tuple[fx.Node, ...]
    given: tuple[fx.Node, ...]
    cuts: tuple[int | None, ...]
    target: InSlices


class SliceWriter:
    """Writes the graph of one slice.

    Args:
        results: what it returns, as captured nodes.
        parts: the captured ops that make them, in captured order.
    """

    def __init__(self, results: tuple[fx.Node, ...], parts: Sequence[fx.Node]) -> None:
        self.results, self.parts = results, tuple(parts)
        self.graph = fx.Graph()
        self.inputs: dict[tuple[fx.Node, Any], fx.Node] = {}
        self._says: list[str] = []
        self._words: dict[fx.Node, str] = {}

    # -- what a kind of slices says -------------------------------------------------------------------------------

    def given(self, part: fx.Node) -> Iterator[tuple[fx.Node, Any]]:
        """What ``part`` reads that no part makes, and how a slice is given it."""
        raise NotImplementedError

    def write(self, part: fx.Node) -> None:
        """Call ``part`` in the graph."""
        raise NotImplementedError

    def made(self, part: fx.Node) -> fx.Node:
        """The node in the graph that is the slice of ``part``."""
        raise NotImplementedError

    # -- the graph ------------------------------------------------------------------------------------------------

    def written(self) -> tuple[tuple[fx.Node, ...], tuple[Any, ...]]:
        """Write all of it; returns what it is given, and how."""
        pairs = list(dict.fromkeys(pair for part in self.parts for pair in self.given(part)))
        for index, pair in enumerate(pairs):
            self.inputs[pair] = self.graph.placeholder(f"given_{index}")
            self._words[self.inputs[pair]] = f"%{index}"
        for part in self.parts:
            self.write(part)
        self.graph.output(tuple(map(self.made, self.results)))
        given, how = zip(*pairs, strict=True)
        return given, how

    def call(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        """One more call in the graph."""
        node = self.graph.call_function(target, args, dict(kwargs))
        words = fx.map_arg((args, dict(kwargs)), lambda each: _Word(self._words[each]))
        inner = [repr(each) for each in words[0]] + [f"{key}={each!r}" for key, each in sorted(words[1].items())]
        self._words[node] = f"_{len(self._says)}"
        self._says.append(f"{target}({', '.join(inner)})")
        return node

    def text(self, axis: str, how: str) -> str:
        """The name of what has been written, in slices of ``axis``; ``how`` says the same for everything given."""
        returned = ", ".join(self._words[self.made(each)] for each in self.results)
        digest = hashlib.sha256(f"{how}; {'; '.join(self._says)}; {returned}".encode()).hexdigest()[:12]
        names = ", ".join(str(part.target).split(".")[1] for part in self.parts)
        return f"by_{axis}[{names}; {digest}]"


class _Word(str):
    """Text that prints without quotes inside of argument lists."""

    def __repr__(self) -> str:
        return str(self)
