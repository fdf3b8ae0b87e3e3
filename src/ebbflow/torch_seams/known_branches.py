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
import operator
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ebbflow.signals import raised_by_a_handler
from ebbflow.torch_seams.fake_tensors import without_modes
from ebbflow.torch_seams.graphs import expression_of, hint_of
from ebbflow.torch_seams.patches import Attribute, patched
from ebbflow.torch_seams.storages import storage_key

__all__ = ["Condition", "codes_that_branch", "known_branches", "tables_of_codes"]

_MOST_BYTES = 2**26  # computed for one condition; what it is computed from exists in the step as well
_MODULES = ("torch", "_operator", "math", "builtins")


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
        return all(each.is_Integer for each in numbers) and _computed(self.graph, map(int, numbers)) is self.outcome


@contextmanager
def known_branches() -> Iterator[list[Condition]]:
    """While open, captures of this thread take branches on known tensors; gives the conditions that have symbols."""
    conditions: list[Condition] = []
    thread = threading.get_ident()
    with ExitStack() as stack:
        for kind, table in tables_of_codes():
            for code, name in enumerate(codes_that_branch()):
                if name is not None and table[code] is not None:
                    table[code] = functools.partial(_decide, table[code], name, thread, conditions)
            stack.enter_context(patched(Attribute(kind, "dispatch_table"), table))
        yield conditions


def tables_of_codes() -> Iterator[tuple[type, list[Any]]]:
    """Dynamo's translators of code, each with a copy of its table: per code of Python's instructions what traces it."""
    from torch._dynamo import symbolic_convert

    for kind in (symbolic_convert.InstructionTranslator, symbolic_convert.InliningInstructionTranslator):
        for each in (kind, *kind.__subclasses__()):
            yield each, list(each.dispatch_table)


@functools.cache
def codes_that_branch() -> list[str | None]:
    """Per code of Python's instructions its name, if it asks for the truth of a value."""
    import dis

    names: list[str | None] = [None] * 256
    for name, code in dis.opmap.items():
        if code < 256 and ("IF_TRUE" in name or "IF_FALSE" in name or name == "UNARY_NOT"):
            names[code] = name
    return names


def _decide(
    below: Callable[..., None], name: str, thread: int, conditions: list[Condition], tx: Any, instruction: Any
) -> None:
    """One instruction that asks for the truth of what is on top of the stack."""
    from torch._dynamo.variables import ConstantVariable, TensorVariable

    if thread == threading.get_ident() and isinstance(tx.stack[-1], TensorVariable):
        found = _condition(tx.stack[-1].as_proxy().node)
        if found is not None:
            if found.symbols:
                conditions.append(found)
            if name.endswith("OR_POP"):  # the value of ``a or b``, which stays the tensor
                if found.outcome is ("TRUE" in name):
                    tx.jump(instruction)
                else:
                    tx.pop()
                return
            tx.stack[-1] = ConstantVariable.create(found.outcome)
    below(tx, instruction)


def _condition(node: fx.Node) -> Condition | None:
    """The condition that ``node`` is, if it is known."""
    used: dict[fx.Node, None] = {}
    return _as_condition(node, used) if _collect(node, used) and not _written_to(node.graph, used) else None


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
        if not isinstance(value, torch.Tensor | tuple | list | torch.Size) or not _is_torchs(node):
            return False
        stack.extend(node.all_input_nodes)
    tensors = [each for each in (node.meta["example_value"] for node in used) if isinstance(each, torch.Tensor)]
    if any(each.is_floating_point() and torch.is_autocast_enabled(each.device.type) for each in tensors):
        return False
    return sum(_bytes(each) for each in tensors) <= _MOST_BYTES


def _bytes(tensor: torch.Tensor) -> int:
    count = tensor.numel()
    return (hint_of(count) if isinstance(count, torch.SymInt) else count) * tensor.element_size()


def _is_torchs(node: fx.Node) -> bool:
    if "empty" in str(getattr(node.target, "__name__", node.target)) or _changes(node):
        return False
    if node.op == "call_method":
        return True
    plain = isinstance(node.target, types.FunctionType | types.BuiltinFunctionType | type)
    home = str(getattr(node.target, "__module__", None) or "torch")
    return node.op == "call_function" and plain and home.split(".")[0] in _MODULES


def _changes(node: fx.Node) -> bool:
    """Whether a call may write to an argument."""
    name = str(getattr(node.target, "__name__", node.target))
    plain = name.strip("_")
    if node.target is operator.setitem or "out" in node.kwargs or plain == "setitem":
        return True
    if plain.startswith("i") and hasattr(operator, plain[1:]):  # iadd
        return True
    return name.endswith("_") and not name.endswith("__") and getattr(node.target, "__module__", "") != "_operator"


def _written_to(graph: fx.Graph, used: dict[fx.Node, None]) -> bool:
    ours = {storage_key(value) for value in (n.meta["example_value"] for n in used) if isinstance(value, torch.Tensor)}
    changed = (each.meta.get("example_value") for n in graph.nodes if _changes(n) for each in n.all_input_nodes)
    return any(isinstance(value, torch.Tensor) and storage_key(value) in ours for value in changed)


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
    outcome = _computed(module, hints)
    return None if outcome is None else Condition(module, tuple(symbols), outcome)


def _computed(graph: fx.GraphModule, numbers: Any) -> bool | None:
    """The truth of what ``graph`` gives; ``None`` if it draws random numbers, or cannot be computed here."""
    before = _random_states()
    try:
        with without_modes(), torch.no_grad():
            outcome = bool(fx.Interpreter(graph).run(*numbers))
    except Exception as error:
        if raised_by_a_handler(error):
            raise
        return None
    finally:
        drawn = [not torch.equal(old, new) for old, new in zip(before, _random_states(), strict=True)]
        torch.set_rng_state(before[0])
        for index, state in enumerate(before[1:]):
            torch.cuda.set_rng_state(state, index)
    return None if any(drawn) else outcome


def _random_states() -> list[torch.Tensor]:
    with without_modes():
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return [torch.get_rng_state(), *cuda]
