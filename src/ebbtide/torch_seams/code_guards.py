"""Guards of code: classes, functions, builtins and registers, of which Dynamo knows what was there when it looked.

1. Whether a class of an object that was looked at has got another attribute of its own, which may hide what was found
   in a base, or another function. What torch, ``copy`` and ``inspect`` put into a class by themselves does not count.
2. Whether a function that was traced has got another ``__code__`` (as reloading gives it one).
3. Whether a global hides a builtin by now.
4. Whether an object is an instance of a class that others can be registered with.
"""

from __future__ import annotations

import types
import weakref
from abc import ABCMeta
from collections.abc import Callable, Collection, Container
from typing import Any

import torch

from ebbtide.torch_seams.guard_makers import Held, guard_anywhere, of_this_trace

__all__ = ["guard_classes", "guard_code", "of_builtins", "of_functions", "of_registers"]

_FUNCTIONS = "_ebbtide_functions"  # of a trace: the functions that it has traced, with their code
_BUILTINS = "_ebbtide_builtins"  # the builtins that it has found, beside the globals that have none of their names
_HEAP_TYPE = 1 << 9  # of ``type.__flags__``: made by Python code, so that it can change
_BY_THEMSELVES = frozenset(
    (
        *("__annotations__", "__annotations_cache__", "__annotate_func__", "__conditional_annotations__", "__doc__"),
        *("__slotnames__", "__abstractmethods__", "__static_attributes__", "__firstlineno__", "__weakref__"),
    )
)
"""Of a class's attributes, what ``copyreg``, ``inspect`` and Python itself add when they look at it."""

_Below = Callable[..., Any]


def guard_classes(graph: Any) -> None:
    """Guard the classes of the objects that ``graph``, the output of a trace that is done, has looked at (1)."""
    seen: dict[type, None] = {}
    for each in tuple(graph.side_effects.id_to_variable.values()):
        value = vars(each).get("value")  # an attribute of one that is not made yet would make it
        for kind in type(value).__mro__ if value is not None else ():
            if kind.__flags__ & _HEAP_TYPE:
                seen[kind] = None
    if seen:
        traced = {id(function()) for function, _ in (of_this_trace(_FUNCTIONS) or {}).values()}
        watched = _Watched(seen, traced)
        says = "attributes of the classes of the objects that the step reads"
        guard_anywhere("classes", says, lambda *_: watched.are_as_they_were())


class _Watched:
    """Guards the attributes of some classes (definition 1), which are held weakly.

    Args:
        kinds: the classes. Functions of modules' classes are in the key of a step (``engine.key``).
        traced: the ids of the functions that were.
    """

    def __init__(self, kinds: Collection[type], traced: Container[int]) -> None:
        self._names = {weakref.ref(kind): _own_names(kind) for kind in kinds}
        self._counts = [(kind, len(kind().__dict__)) for kind in self._names]
        self._functions = [
            (weakref.ref(kind), name, Held(value))
            for kind in kinds
            if not issubclass(kind, torch.nn.Module)
            for name, value in tuple(vars(kind).items())  # at once: other threads may add to it
            if id(_function_of(value)) in traced
        ]

    def are_as_they_were(self) -> bool:
        """Whether they have the attributes of their own that they had, and the functions that were traced."""
        try:  # what is asked at every call
            same = all([len(kind().__dict__) == count for kind, count in self._counts])
        except AttributeError:  # one is gone
            same = False
        return (same or self._have_their_names()) and all(
            [kind() is None or held.get() is kind().__dict__.get(name) for kind, name, held in self._functions]
        )

    def _have_their_names(self) -> bool:
        here = [(kind, names) for ref, names in self._names.items() if (kind := ref()) is not None]
        if any(_own_names(kind) != names for kind, names in here):
            return False
        self._counts = [(weakref.ref(kind), len(kind.__dict__)) for kind, _ in here]
        return True


def _own_names(kind: type) -> frozenset[str]:
    return frozenset(vars(kind)) - _BY_THEMSELVES


def _function_of(value: Any) -> Any:
    """What is called where a class has ``value``."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def of_functions(below: _Below) -> _Below:
    """Note which functions are traced, where a trace asks for their code."""

    def get_code(owner: Any) -> Any:
        code = below(owner)
        if isinstance(function := vars(owner).get("fn"), types.FunctionType):
            traced = of_this_trace(_FUNCTIONS)
            if traced is not None and function.__code__ is code:
                traced[id(function)] = weakref.ref(function), code
        return code

    return get_code


def of_builtins(below: _Below) -> _Below:
    """Note which builtins are found, and beside which globals."""

    def load(owner: Any, instruction: Any) -> Any:
        found = of_this_trace(_BUILTINS)
        if found is not None and instruction.argval not in owner.f_globals:
            found.setdefault(id(owner.f_globals), (owner.f_globals, set()))[1].add(instruction.argval)
        return below(owner, instruction)

    return load


def guard_code() -> None:
    """Guard what the trace has noted (2 and 3)."""
    traced = list((of_this_trace(_FUNCTIONS) or {}).values())
    found = list((of_this_trace(_BUILTINS) or {}).values())
    if traced:
        guard_anywhere("code", "code of the functions that are called", lambda *_: _have_code(traced))
    if found:
        says = "no global hides a builtin that is called"
        guard_anywhere("builtins", says, lambda *_: all([hiding.keys().isdisjoint(names) for hiding, names in found]))


def _have_code(traced: list[tuple[weakref.ref[Any], types.CodeType]]) -> bool:
    """Whether all functions have their code; those that are gone do not count."""
    try:
        return all([function().__code__ is code for function, code in traced])  # type: ignore[union-attr]
    except AttributeError:
        here = [(function(), code) for function, code in traced]
        return all(function is None or function.__code__ is code for function, code in here)


def of_registers(ask: Callable[[Any, Any], bool], below: _Below) -> _Below:
    """Guard what ``isinstance`` or ``issubclass`` says of a class with a register (4)."""

    def call(owner: Any, tx: Any, left: Any, right: Any) -> Any:
        answer = below(owner, tx, left, right)
        try:
            kind = left.python_type() if ask is isinstance else left.as_python_constant()
            classes, known = right.as_python_constant(), answer.as_python_constant()
        except Exception:
            return answer
        kinds: tuple[Any, ...] = classes if isinstance(classes, tuple) else (classes,)
        if isinstance(kind, type) and kind.__flags__ & _HEAP_TYPE and any(isinstance(each, ABCMeta) for each in kinds):
            held, holders = Held(kind), tuple(map(Held, kinds))
            says = f"whether {kind.__name__} is registered with a class"
            guard_anywhere(("register", kind, kinds), says, lambda *_: _is_registered(held, holders) == known)
        return answer

    return call


def _is_registered(held: Held, holders: tuple[Held, ...]) -> bool | None:
    kinds = [each.get() for each in holders]
    return None if (kind := held.get()) is None else any(issubclass(kind, each) for each in kinds if each is not None)
