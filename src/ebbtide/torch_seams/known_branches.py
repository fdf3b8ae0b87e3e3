"""A branch on a tensor that follows from numbers alone is taken while a step is captured.

Dynamo refuses every branch on a tensor. Where the tensor depends on no data (``torch.arange`` and what is computed
from it), its value is known:
1. A tensor is *known* if it is computed by torch's own functions from numbers, and nothing has been written to the
   memory of what it is computed from. What draws random numbers or is not initialised is not known.
2. A known condition is computed for real, and the branch is the one that eager takes.
3. Where sizes are symbols, it is computed at the sizes at hand, and is a :class:`Condition`: at other sizes the capture
   is the step only if the condition has the same outcome there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ebbtide.torch_seams.conditions import (
    autocast_now,
    casts,
    changes,
    codes_that_branch,
    decided,
    is_torchs,
    tables_of_codes,
    truth_of,
    written_to,
)
from ebbtide.torch_seams.graphs import expression_of, hint_of
from ebbtide.torch_seams.patches import Attribute, handing_on, patched

__all__ = ["Condition", "known_branches"]

_MOST_BYTES = 2**26  # computed for one condition; what it is computed from exists in the step as well


@dataclass(frozen=True)
class Condition:
    """A known condition of a branch (definition 3).

    Attributes:
        graph: from its symbols to the condition.
        symbols: expressions of the graph's placeholders, in order.
        outcome: with which the step was captured.
    """

    graph: fx.GraphModule
    symbols: tuple[Any, ...]
    outcome: bool

    def holds(self, values: Mapping[Any, Any]) -> bool:
        """Whether the outcome is the same where the symbols have these values."""
        numbers = [each.xreplace(values) for each in self.symbols]
        return all(each.is_Integer for each in numbers) and truth_of(self.graph, map(int, numbers)) is self.outcome


@contextmanager
def known_branches() -> Iterator[list[Condition]]:
    """While open, captures of this thread take branches on known tensors; gives the conditions that have symbols."""
    conditions: list[Condition] = []
    thread, begun = threading.get_ident(), autocast_now()
    with ExitStack() as stack:
        for kind, table in tables_of_codes():
            for code, name in enumerate(codes_that_branch()):
                if name is not None and table[code] is not None:
                    table[code] = functools.partial(_decide, handing_on(table[code]), name, thread, begun, conditions)
            stack.enter_context(patched(Attribute(kind, "dispatch_table"), table))
        yield conditions


def _decide(
    below: Callable[..., None],
    name: str,
    thread: int,
    begun: Mapping[str, bool],
    conditions: list[Condition],
    tx: Any,
    instruction: Any,
) -> None:
    """One instruction that asks for the truth of what is on top of the stack."""
    from torch._dynamo.variables import TensorVariable

    if thread == threading.get_ident() and isinstance(tx.stack[-1], TensorVariable):
        found = _condition(tx.stack[-1].as_proxy().node, begun)
        if found is not None:
            if found.symbols:
                conditions.append(found)
            if decided(tx, instruction, name, found.outcome):
                return
    below(tx, instruction)


def _condition(node: fx.Node, begun: Mapping[str, bool]) -> Condition | None:
    """The condition that ``node`` is, if it is known."""
    used: dict[fx.Node, None] = {}
    known = _collect(node, used) and not casts(node, used, begun) and not written_to(node, used)
    return _as_condition(node, used) if known else None


def _collect(root: fx.Node, used: dict[fx.Node, None]) -> bool:
    """Enter what ``root`` is computed from; false if that is more than numbers."""
    stack = [root]
    while stack:
        node = stack.pop()
        if node in used:
            continue
        used[node] = None
        value = node.meta.get("example_value")
        if isinstance(value, int | torch.SymInt):
            continue
        if not isinstance(value, torch.Tensor | tuple | list | torch.Size) or not is_torchs(node) or changes(node):
            return False
        stack.extend(node.all_input_nodes)
    tensors = [each for each in (node.meta["example_value"] for node in used) if isinstance(each, torch.Tensor)]
    return sum(_bytes(each) for each in tensors) <= _MOST_BYTES


def _bytes(tensor: torch.Tensor) -> int:
    count = tensor.numel()
    return (hint_of(count) if isinstance(count, torch.SymInt) else count) * tensor.element_size()


def _as_condition(root: fx.Node, used: dict[fx.Node, None]) -> Condition | None:
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    symbols: list[Any] = []
    hints: list[int] = []
    ordered = [node for node in root.graph.nodes if node in used]
    for node in ordered:
        value = node.meta["example_value"]
        if isinstance(value, torch.SymInt):
            copies[node] = graph.placeholder(node.name)
            symbols.append(expression_of(value))
            hints.append(hint_of(value))
        elif isinstance(value, int):
            copies[node] = value
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[root])
    module = fx.GraphModule({}, graph)
    outcome = truth_of(module, hints)
    return None if outcome is None else Condition(module, tuple(symbols), outcome)
