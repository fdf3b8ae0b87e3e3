"""``contextvars.ContextVar`` in traced code, whose methods Dynamo does not know: transformers records outputs by one.

1. What the trace sets, it reads: a value that was set stays in the trace, until its token resets it.
2. What nobody set in the trace is read for real, and guarded: where the variable has another value, the step is another
   one. A variable without a value is left to Dynamo, which refuses it. So is reading where Dynamo knows these variables
   itself, from torch 2.14 on: it guards what it reads, and refuses to set.
3. A variable that is still set where the trace ends is refused: what runs the graph sets none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch._guards import TracingContext

from ebbtide.torch_seams.patches import Attribute, wrapped

__all__ = ["STAYS_SET", "context_variables_traced"]

STAYS_SET = "a context variable stays set"
"""The text of the refusal of definition 3."""

_SET = "_ebbtide_context_variables"  # of a trace: what it set and did not reset, the newest last


class _Token:
    """What ``set`` gives, and ``reset`` takes."""


@dataclass(frozen=True)
class _Setting:
    """A value that the trace set; ``place`` is the user's code that did."""

    variable: ContextVar[Any]
    value: Any
    token: _Token
    place: Any


@contextmanager
def context_variables_traced() -> Iterator[None]:
    """While open, captures of this thread trace context variables by definitions 1 to 3."""
    from torch._dynamo import variables
    from torch._dynamo.output_graph import OutputGraph

    owner = getattr(variables, "ContextVarVariable", variables.UserDefinedObjectVariable)
    with ExitStack() as stack:
        stack.enter_context(wrapped(Attribute(owner, "call_method"), _of_context_variables, this_thread=True))
        ends = Attribute(OutputGraph, "compile_and_call_fx_graph")
        stack.enter_context(wrapped(ends, _refuse_what_stays, this_thread=True))
        yield


def _of_context_variables(below: Callable[..., Any]) -> Callable[..., Any]:
    def call_method(owner: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        known_to_dynamo = getattr(owner, "cv_obj", None)
        variable = getattr(owner, "value", None) if known_to_dynamo is None else known_to_dynamo
        if type(variable) is not ContextVar or kwargs:
            return below(owner, tx, name, args, kwargs)
        found: Any = None
        if name == "set" and len(args) == 1:
            found = _set(tx, variable, args[0])
        elif name == "reset" and len(args) == 1:
            found = _reset(tx, variable, args[0])
        elif name == "get":
            found = _set_here(tx, variable)
            if found is None and known_to_dynamo is None:
                found = _read(tx, owner, args)
        return below(owner, tx, name, args, kwargs) if found is None else found

    return call_method


def _still_set(graph: Any) -> list[_Setting]:
    return vars(graph).setdefault(_SET, [])


def _set(tx: Any, variable: ContextVar[Any], value: Any) -> Any:
    from torch._dynamo.variables import UserDefinedObjectVariable

    token = _Token()
    _still_set(tx.output).append(_Setting(variable, value, token, TracingContext.extract_stack()))
    return UserDefinedObjectVariable(token)


def _reset(tx: Any, variable: ContextVar[Any], token: Any) -> Any:
    """``None`` where the token is none of the variable's in this trace."""
    from torch._dynamo.variables import ConstantVariable

    still = _still_set(tx.output)
    given = getattr(token, "value", None)
    at = next((at for at, each in enumerate(still) if each.variable is variable and each.token is given), None)
    if at is None:
        return None
    still[at:] = [each for each in still[at:] if each.variable is not variable]
    return ConstantVariable.create(None)


def _set_here(tx: Any, variable: ContextVar[Any]) -> Any:
    """``None`` where the trace has not set it."""
    return next((each.value for each in reversed(_still_set(tx.output)) if each.variable is variable), None)


def _read(tx: Any, owner: Any, args: Any) -> Any:
    """``None`` where the variable has no value."""
    from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
    from torch._dynamo.variables.base import VariableTracker

    try:
        value = owner.value.get()
    except LookupError:
        return None
    if args or owner.source is None:  # a guard asks without a default
        return None
    return VariableTracker.build(tx, value, CallFunctionNoArgsSource(AttrSource(owner.source, "get")))


def _refuse_what_stays(below: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.exc import Unsupported

    def compile_graph(graph: Any, *args: Any, **kwargs: Any) -> Any:
        if still := _still_set(graph):
            error = Unsupported(f"{STAYS_SET}: {still[0].variable.name}")
            error.real_stack = still[0].place  # which Dynamo tells as the user's code
            raise error
        return below(graph, *args, **kwargs)

    return compile_graph
