"""Ops of rules that stand for captured calls: what each computes is said by its *reference graph*.

1. A reference graph has an input for each tensor that the op is given. All else in it are copies of captured calls,
   views among them, and elements of what they give; each copy knows the name of the captured call.
2. How the op computes that, its rule says. That it has the bits of its reference graph, the rule proves; that the
   reference graph is of the captured step, is proven for all alike (``rewrites.rewrite_proof``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

__all__ = ["PART", "ReferenceOp", "ReferenceWriter", "parts_of", "text_of"]

PART = "ebbtide_part"
"""Key in the meta of a copy: the name of the captured call."""


class ReferenceOp:
    """The target of a call that computes what ``reference`` says.

    Args:
        name: by which generated code calls it.
        reference: its graph (definition 1).
        text: all that it does, in words that are the same in every process.
    """

    borrows = True
    """Nothing that it is given is written to (``cost.profiling_budget``)."""

    def __init__(self, name: str, reference: fx.Graph, text: str) -> None:
        self.__name__ = name
        self.reference = reference
        self._text = text

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


class ReferenceWriter:
    """Writes a reference graph.

    Attributes:
        graph: it.
        copies: of captured nodes, each the input that has its value, or the copy of its call.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}

    def given(self, node: fx.Node) -> fx.Node:
        """An input with the value of ``node``."""
        made = self.graph.placeholder(f"given_{len(self.graph.nodes)}")
        made.meta = {"val": node.meta["val"]}
        return made

    def copy(self, node: fx.Node) -> fx.Node:
        """What has the value of ``node``: its copy, after copies of all that it reads and that is not given."""
        if node not in self.copies:
            self.copies[node] = self.call(node, *fx.map_arg((node.args, node.kwargs), self.copy))
        return self.copies[node]

    def call(self, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        """A copy of a captured call that reads ``args``."""
        assert callable(node.target)
        made = self.graph.call_function(node.target, args, dict(kwargs))
        made.meta = {"val": node.meta["val"], PART: node.name}
        return made


def parts_of(reference: fx.Graph) -> list[str]:
    """The names of the captured calls in it, in order."""
    return [node.meta[PART] for node in reference.nodes if PART in node.meta]


def text_of(graph: fx.Graph) -> tuple[list[str], str]:
    """The calls of a reference graph and what it returns, in words that are the same in every process."""
    words: dict[fx.Node, _Word] = {}
    says: list[str] = []
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), words.__getitem__)
        if node.op == "placeholder":
            words[node] = _Word(f"%{len(words)}")
        elif node.op == "output":
            return says, repr(args[0])
        else:
            words[node] = _Word(f"_{len(says)}")
            inner = [*map(repr, args), *(f"{key}={each!r}" for key, each in sorted(kwargs.items()))]
            says.append(f"{node.target}({', '.join(inner)})")
    raise AssertionError("a graph without an output")


class _Word(str):
    """A word for a value, which is written as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
