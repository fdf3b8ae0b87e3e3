"""A branch on the values of a step's inputs is taken as eager takes it, and asked again before every later call.

Dynamo refuses every branch on a tensor, and libraries ask their inputs: transformers leaves out an attention mask that
masks nothing, and with it takes other kernels.
1. A :class:`Question` is what such a branch asks, if torch's own functions compute it from sizes and from tensors that
   the call brings or the model keeps in buffers, none of which takes gradients, and to whose memory nothing is written.
2. It is answered for the call that is captured, and the branch is the one that eager takes.
3. The capture is the step of those calls alone in which all its questions have the same answers, asked in this order:
   what a later one asks may make sense only after the answer to an earlier one.
4. It is answered in the precision in which eager computes it: as written. What is computed under autocast is left to
   Dynamo, which refuses the branch.
5. A capture asks :data:`_MOST_QUESTIONS` at the most, each of which computes :data:`_MOST_BYTES` in all: that is before
   a step takes anything, and a budget has to hold it. What asks for more, a loop over the values of a sequence or a
   look at what the model computes, is left to Dynamo.
6. A number that is read from a tensor is a symbol to Dynamo, which says of it that it is equal to itself. A NaN is not:
   a comparison whose outcome Dynamo knows without the number is a question too, and refused where it cannot be one.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import operator
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import fx

from ebbtide.signals import raised_by_a_handler
from ebbtide.torch_seams.conditions import (
    autocast_now,
    casts,
    changes,
    codes_that_branch,
    codes_that_compare,
    decided,
    is_torchs,
    plainly,
    storages_of,
    tables_of_codes,
    truth_of,
    written_by,
    written_unseen,
)
from ebbtide.torch_seams.graphs import hint_of, size_source
from ebbtide.torch_seams.patches import Attribute, handing_on, patched

__all__ = ["TELLS_NAN", "Question", "branches_on_inputs", "other_answer"]

TELLS_NAN = "a number that the step computes is compared with itself, which tells a NaN from others"
"""What Dynamo's error says where no question can be asked (definition 6)."""
_MOST_QUESTIONS = 64
_MOST_BYTES = 2**28
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_LOCALS = "L"
"""What Dynamo calls the arguments of the function that it captures where it says what a value is from."""


@dataclass(frozen=True)
class Question:
    """What a branch asks of a call (definition 1).

    Attributes:
        graph: from tensors and sizes of the call to the condition.
        inputs: where the graph's inputs are, as expressions of the captured function's arguments.
        answer: with which the step was captured.
        bytes: of all that is computed for it, but for what kernels take besides.
        place: text of the line that asks, with file and number.
    """

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    answer: bool
    bytes: int
    place: str

    def holds(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments, by name, gives the same answer."""
        try:
            with plainly():
                return bool(self.graph(*_values(self.inputs, arguments))) is self.answer
        except Exception as error:
            if raised_by_a_handler(error):
                raise
            return False

    def __str__(self) -> str:
        return f"{self.place} was {'true' if self.answer else 'false'}"


def other_answer(questions: Sequence[Question], arguments: Mapping[str, Any]) -> Question | None:
    """The first question that a call answers otherwise than the captured one; ``None`` if there is none."""
    return next((each for each in questions if not each.holds(arguments)), None)


@contextmanager
def branches_on_inputs(arguments: Mapping[str, Any]) -> Iterator[list[Question]]:
    """While open, captures of this thread take branches on their inputs; gives what was asked, in order.

    Args:
        arguments: of the function that is captured, by name.
    """
    asking = _Asking(arguments, threading.get_ident())
    with ExitStack() as stack:
        for kind, table in tables_of_codes():
            for code in codes_that_compare():
                table[code] = functools.partial(asking.compare, handing_on(table[code]))
            for code, name in enumerate(codes_that_branch()):
                if name is not None and table[code] is not None:
                    table[code] = functools.partial(asking.decide, handing_on(table[code]), name)
            stack.enter_context(patched(Attribute(kind, "dispatch_table"), table))
        yield asking.asked


class _Asking:
    """What one capture has asked. Dynamo begins anew where it has to, and asks again."""

    def __init__(self, arguments: Mapping[str, Any], thread: int) -> None:
        self.asked: list[Question] = []
        self._arguments, self._thread = arguments, thread
        self._autocast = autocast_now()
        self._known: dict[object, Question] = {}

    def decide(self, below: Callable[..., None], name: str, tx: Any, instruction: Any) -> None:
        """One instruction that asks for the truth of what is on top of the stack."""
        if threading.get_ident() == self._thread and _depends_on_data(tx.stack[-1]):
            found = self._question(tx.stack[-1].as_proxy().node, tx)
            if found is not None and decided(tx, instruction, name, found.answer):
                return
        below(tx, instruction)

    def compare(self, below: Callable[..., None], tx: Any, instruction: Any) -> None:
        """One instruction that compares what is on top of the stack (definition 6)."""
        from torch._dynamo.exc import Unsupported
        from torch._dynamo.variables import ConstantVariable

        asks = threading.get_ident() == self._thread and all(map(_is_read_float, tx.stack[-2:]))
        given = [each.as_proxy() for each in tx.stack[-2:]] if asks else []
        below(tx, instruction)
        if not asks or _depends_on_data(tx.stack[-1]):
            return
        compared = tx.output.create_proxy("call_function", _COMPARISONS[instruction.argval], tuple(given), {})
        found = self._question(compared.node, tx)
        if found is None:
            raise Unsupported(TELLS_NAN)
        tx.stack[-1] = ConstantVariable.create(found.answer)

    def _question(self, root: fx.Node, tx: Any) -> Question | None:
        used = _computed_from(root)
        if used is not None and casts(root, used, self._autocast):
            return None
        size = 0 if used is None else sum(_bytes(_example(node)) for node in used if node.op != "placeholder")
        taken = None if used is None or size > _MOST_BYTES else _taken_out(root, used, self._arguments)
        if taken is None:
            return None
        graph, inputs = taken
        key = (graph.python_code("self").src, inputs)
        if key not in self._known and len(self.asked) < _MOST_QUESTIONS:
            module = fx.GraphModule({}, graph)
            answer = truth_of(module, _values(inputs, self._arguments))
            if answer is not None:
                self._known[key] = Question(module, inputs, answer, size, _place(tx))
                self.asked.append(self._known[key])
        return self._known.get(key)


def _depends_on_data(variable: Any) -> bool:
    """Whether it is a tensor, or a number that is read from one."""
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.tensor import SymNodeVariable
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if isinstance(variable, SymNodeVariable):
        return bool(free_unbacked_symbols(variable.sym_num))
    return isinstance(variable, TensorVariable)


def _is_read_float(variable: Any) -> bool:
    """Whether it is a floating number that is read from a tensor."""
    from torch._dynamo.variables.tensor import SymNodeVariable

    symbol = variable.sym_num if isinstance(variable, SymNodeVariable) else None
    return isinstance(symbol, torch.SymFloat) and _depends_on_data(variable)


def _place(tx: Any) -> str:
    path, line = tx.f_code.co_filename, tx.lineno
    return f"{linecache.getline(path, line).strip()!r} ({Path(path).name}:{line})"


def _taken_out(
    root: fx.Node, used: Container[fx.Node], arguments: Mapping[str, Any]
) -> tuple[fx.Graph, tuple[str, ...]] | None:
    """What computes ``root`` of the nodes ``used``, and where its inputs are; ``None`` if one is nowhere."""
    graph, copies, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[str]()
    for node in root.graph.nodes:
        if node not in used:
            continue
        if node.op == "placeholder" or _is_size(node):
            source = (
                size_source(value) if isinstance(value := _example(node), torch.SymInt) else _source(node, arguments)
            )
            if source is None:
                return None
            inputs.append(source)
            copies[node] = graph.placeholder(node.name)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}
    graph.output(copies[root])
    return graph, tuple(inputs)


def _computed_from(root: fx.Node) -> set[fx.Node] | None:
    """``root`` and all that it is computed from; ``None`` if not all of it is as definition 1 has it."""
    before = list(itertools.takewhile(lambda node: node is not root, root.graph.nodes))
    writes = [node for node in before if changes(node)]
    used: set[fx.Node] = set()
    stack = [root]
    while stack:
        if not _collect(stack, used):
            return None
        memory = storages_of(used)
        stack = [n for n in writes if n not in used and not memory.isdisjoint(written_by(n))]
    written: set[int] = set().union(*(written_by(node) for node in used if changes(node)))
    given = storages_of(node for node in used if node.op == "placeholder")
    return used if written.isdisjoint(given) and not written_unseen(used, written) else None


def _collect(stack: list[fx.Node], used: set[fx.Node]) -> bool:
    """Enter the nodes of ``stack`` with all that they are computed from; false if one is not as definition 1 has it."""
    while stack:
        node = stack.pop()
        if node in used:
            continue
        used.add(node)
        if _is_size(node):
            continue
        value = _example(node)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return False
        if node.op != "placeholder" and not is_torchs(node):
            return False
        stack.extend(node.all_input_nodes)
    return True


def _example(node: fx.Node) -> object:
    return node.meta.get("example_value")


def _is_size(node: fx.Node) -> bool:
    """Whether it is a number that follows from sizes of inputs, whatever it was read from."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    value = _example(node)
    return isinstance(value, torch.SymInt) and not free_unbacked_symbols(value)


def _bytes(value: object) -> int:
    """Bytes of a fake tensor; too many for one whose sizes depend on data."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if not isinstance(value, torch.Tensor):
        return 0
    count = value.numel()
    if isinstance(count, torch.SymInt):
        count = _MOST_BYTES + 1 if free_unbacked_symbols(count) else hint_of(count)
    return count * value.element_size()


def _source(node: fx.Node, arguments: Mapping[str, Any]) -> str | None:
    """Where an input of Dynamo's graph is found among the arguments of a call, if it is."""
    given = node.meta.get("grapharg")
    if given is None or given.source is None:
        return None
    try:
        (value,) = _values([given.source.name], arguments)
        other = value is not given.example or isinstance(value, torch.nn.Parameter)
        return None if isinstance(value, torch.Tensor) and other else given.source.name
    except Exception as error:  # made by Dynamo itself, or said with names that are its own
        if raised_by_a_handler(error):
            raise
        return None


def _values(sources: Sequence[str], arguments: Mapping[str, Any]) -> list[Any]:
    return [eval(_compiled(source), {_LOCALS: arguments}) for source in sources]


@functools.lru_cache(maxsize=1024)
def _compiled(source: str) -> CodeType:
    return compile(source, "<source>", "eval")
