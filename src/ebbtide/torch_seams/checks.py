"""Checks that the user's code makes of values of tensors, traced as calls of one op; Dynamo makes no graph of most.

1. ``torch._check_tensor_all(condition, message)`` and its kin are a check: Dynamo reads a number for them.
2. A branch on a tensor is one if one of its ways does nothing but raise: ``if (x > 9).any(): raise ValueError("...")``,
   ``assert not x.isnan().any()``. Such a way is loads and formatting, one exception made with at most one argument, and
   its ``raise``, which nothing of the user's can catch.
3. The op takes the condition that has to be true, what is raised else (:class:`Raised`), and tensors that the message
   tells. A check whose exception cannot be made so again is left to Dynamo.
"""

from __future__ import annotations

import functools
import pkgutil
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ebbtide.torch_seams.conditions import codes_that_branch, tables_of_codes
from ebbtide.torch_seams.patches import Attribute, Item, handing_on, patched, wrapped
from ebbtide.torch_seams.tracing import only_withs

__all__ = ["Raised", "checks_as"]

_TOLD = re.compile("\0(\\d+):(.*?)\0")


@dataclass(frozen=True)
class Raised:
    """What a check raises.

    Attributes:
        kind: ``module:name`` of the exception's class.
        message: its argument, empty for none; where it tells tensors, their number and format between zero bytes.
    """

    kind: str
    message: str

    def error(self, told: Sequence[Tensor]) -> Exception:
        """The exception, where the tensors that the message tells have these values."""
        message = _TOLD.sub(lambda found: format(told[int(found[1])], found[2]), self.message)
        kind = pkgutil.resolve_name(self.kind)
        return kind(message) if self.message else kind()


@contextmanager
def checks_as(op: Any) -> Iterator[None]:
    """While open, captures of this thread call ``op(condition, kind, message, told)`` for a check of values."""
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
    with ExitStack() as stack:
        for function in (torch._check_tensor_all, torch._check_tensor_all_with):  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
            place, make = Item(handlers, function), functools.partial(_check_all, op)
            stack.enter_context(wrapped(place, make, this_thread=True, default=lambda *_, **__: None))
        for kind, table in tables_of_codes():
            for code, name in enumerate(codes_that_branch()):
                if name is not None and name.startswith("POP_JUMP") and table[code] is not None:
                    table[code] = functools.partial(_branch, handing_on(table[code]), name, op, threading.get_ident())
            stack.enter_context(patched(Attribute(kind, "dispatch_table"), table))
        yield


def _check_all(op: Any, below: Callable[..., Any]) -> Callable[..., Any]:
    """Trace ``torch._check_tensor_all`` and its kin as ops (definition 1)."""
    from torch._dynamo.variables import ConstantVariable

    def handle(function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        with_kind = function.value is torch._check_tensor_all_with  # type: ignore[attr-defined]
        kind = (given.pop(0) if given else kwargs.get("error_type")) if with_kind else None
        condition, words = (given.pop(0) if given else kwargs.get(name) for name in ("cond", "message"))
        if condition is None or not _is_tensor(condition) or _example(condition).dtype is not torch.bool:
            return below(function, tx, *args, **kwargs)
        error = RuntimeError if kind is None else kind.as_python_constant()
        raised = _raised(error, _wordless(error) if words is None else words.call_function(tx, [], {}))
        if raised is None:
            return below(function, tx, *args, **kwargs)
        _emit(tx, op, condition.call_method(tx, "all", [], {}), raised)
        return ConstantVariable.create(None)

    return handle


def _wordless(kind: type[Exception]) -> Any:
    """What such a check says that has no message."""
    from torch._dynamo.variables import ConstantVariable

    try:
        torch._check_with(kind, False, None)  # type: ignore[arg-type]
    except kind as error:
        return ConstantVariable.create(str(error))
    raise AssertionError("a false check passed")


def _branch(below: Callable[..., None], name: str, op: Any, thread: int, tx: Any, instruction: Any) -> None:
    """Trace a branch (definition 2), an instruction that jumps by the truth of what is on top of the stack."""
    on_top = tx.stack[-1]
    if thread != threading.get_ident() or not _is_tensor(on_top) or _example(on_top).numel() != 1:
        return below(tx, instruction)
    jumps_if = "IF_TRUE" in name
    for start, wanted in ((tx.next_instruction, jumps_if), (instruction.target, not jumps_if)):
        raised = _raised_from(tx, start)
        if raised is None:
            continue
        condition = tx.pop()
        _emit(tx, op, condition if wanted else condition.call_method(tx, "logical_not", [], {}), raised)
        if wanted is jumps_if:
            tx.jump(instruction)
        return None
    return below(tx, instruction)


_LOADS = re.compile(
    r"LOAD_(CONST|SMALL_INT|FAST|FAST_BORROW|FAST_CHECK|GLOBAL|DEREF|ATTR|ASSERTION_ERROR|COMMON_CONSTANT)$"
    r"|PUSH_NULL$|NOP$|FORMAT_|CONVERT_VALUE$|BUILD_STRING$|BINARY_SUBSCR$"
)
_CALLS = re.compile(r"PRECALL$|CALL$|CALL_FUNCTION$")
_MOST_INSTRUCTIONS = 64


def _raised_from(tx: Any, start: Any) -> tuple[Raised, list[Any]] | None:
    """What is raised on the way from the instruction ``start`` on, if the way is one of definition 2."""
    at = tx.indexof[start]
    way = tx.instructions[at : at + _MOST_INSTRUCTIONS]
    loads = next((n for n, each in enumerate(way) if not _LOADS.match(each.opname)), len(way))
    end = next((n for n, each in enumerate(way) if n >= loads and not _CALLS.match(each.opname)), len(way))
    if end == len(way) or way[end].opname != "RAISE_VARARGS" or way[end].arg != 1 or not _is_uncaught(tx, way[end]):
        return None
    return _made_by(tx, way[:loads])


def _is_uncaught(tx: Any, raising: Any) -> bool:
    """Whether nothing of the user's may catch what is raised at the instruction ``raising`` of this frame."""
    while tx is not None:
        if tx.active_generic_context_managers or not only_withs(tx, raising):
            return False
        tx = tx.parent
        raising = tx.current_instruction if tx is not None else None
    return True


def _made_by(tx: Any, loads: Sequence[Any]) -> tuple[Raised, list[Any]] | None:
    """The exception that is made of what these instructions load, which are traced and taken back."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._dynamo.variables.misc import NullVariable

    depth, before, branching = len(tx.stack), list(tx.stack), tx.current_instruction
    try:
        for each in loads:
            tx.current_instruction = each
            tx.dispatch_table[each.opcode](tx, each)
        kind, *args = [each for each in tx.stack[depth:] if not isinstance(each, NullVariable)]
    except TorchDynamoException:
        return None
    finally:
        tx.stack[:] = before
        tx.current_instruction = branching
    with suppress(NotImplementedError):
        error = kind.as_python_constant()
        if isinstance(error, type) and issubclass(error, Exception) and len(args) < 2:
            return _raised(error, args[0] if args else None)
    return None


def _raised(kind: type[Exception], message: Any) -> tuple[Raised, list[Any]] | None:
    """An exception of a class with a traced message, and the traced tensors that it tells (definition 3)."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        if pkgutil.resolve_name(name) is not kind:
            return None
    except (ImportError, AttributeError, ValueError):
        return None
    if message is None:
        return Raised(name, ""), []
    if message.is_python_constant():
        said = message.as_python_constant()
        return (Raised(name, said), []) if isinstance(said, str) and said and "\0" not in said else None
    parts = [each.realize() for each in getattr(message, "sym_args", ())]
    told = [each for each in parts if _is_tensor(each)]
    fits = all(_is_tensor(each) or each.is_python_constant() for each in parts)
    if not parts or not fits or message.sym_kwargs or any(_example(each).requires_grad for each in told):
        return None
    values = [_Told(told.index(each)) if _is_tensor(each) else each.as_python_constant() for each in parts]
    try:
        return Raised(name, message.format_string.format(*values)), told
    except (AttributeError, TypeError, ValueError, LookupError):  # a format that asks more of a tensor
        return None


@dataclass(frozen=True)
class _Told:
    """Stands for a tensor in a message."""

    number: int

    def __format__(self, spec: str) -> str:
        return f"\0{self.number}:{spec}\0"


def _is_tensor(value: Any) -> bool:
    from torch._dynamo.variables import TensorVariable

    return isinstance(value, TensorVariable)


def _example(value: Any) -> Tensor:
    return value.as_proxy().node.meta["example_value"]


def _emit(tx: Any, op: Any, condition: Any, raised: tuple[Raised, list[Any]]) -> None:
    from torch._dynamo.variables.builder import wrap_fx_proxy

    what, told = raised
    given = (condition.as_proxy(), what.kind, what.message, [each.as_proxy() for each in told])
    wrap_fx_proxy(tx, tx.output.create_proxy("call_function", op, given, {}))
