"""What Dynamo reads of Python's objects and does not ask again, so that a later call would be of another step.

Dynamo guards what it has read, but for these, which get a guard of their own while a step is captured:

1. *Order*: of the keys of a dictionary that was iterated over, ``OrderedDict.move_to_end`` among what changes it.
2. *What was not there*: an attribute of a function or a module, and an attribute or a key whose lookup raised. What
   was there is guarded by its value, but for environment variables that a function of Python's library reads.
3. *Attributes as a dictionary*: ``vars(object)`` that was asked for a key or iterated over.
4. *Identity*: whether two objects that were compared are one.
5. *Single values*: an attribute of a dictionary of a class of its own, or of a ``functools.partial``, a ``deque``'s
   ``maxlen``, the sign of a zero.
6. *Code* (``code_guards``).
7. *Lengths* of containers whose class has a ``len()`` of its own, which Dynamo would ask: what they hold is counted.

What would be of the captured call alone is refused: how often a tensor has been written to, and an offloaded tensor.
"""

from __future__ import annotations

import collections
import math
import os
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import _guards

from ebbtide.torch_seams.code_guards import guard_classes, guard_code, of_builtins, of_functions, of_registers
from ebbtide.torch_seams.guard_makers import (
    PLAIN,
    Held,
    add_guard,
    can_change,
    finder,
    guard_anywhere,
    guard_at,
    of_this_trace,
)
from ebbtide.torch_seams.offloaded import is_offloaded
from ebbtide.torch_seams.patches import Attribute, Item, wrapped
from ebbtide.user_objects import elements_of, has_own

__all__ = ["OFFLOADED_READ", "VERSION_READ", "extra_guards"]

OFFLOADED_READ = "a tensor is read that is offloaded in training steps, state of an optimizer (offload_optimizer=True)"
"""The text of a refusal: what is offloaded has another class, and the captured step would keep its memory."""

VERSION_READ = "how often a tensor has been written to (_version) is read"
"""The text of a refusal: it would be that of the call that is captured."""

_PARTIALS = "_ebbtide_partials"  # of a trace: the partials that it has found, by where
_KEYWORDS = "L['kwargs']"
"""What Dynamo calls a call's keywords (``capture.trace``), whose order means nothing."""

_READING = ("var_getattr", "tp_getattro_impl")
"""How a variable is asked for an attribute: up to torch 2.13, and later."""
_NONE: dict[str, Any] = {}

_Below = Callable[..., Any]


@contextmanager
def extra_guards() -> Iterator[None]:
    """While open, captures of this thread guard definitions 1 to 7."""
    from torch._dynamo import symbolic_convert, variables
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator, InstructionTranslatorBase
    from torch._dynamo.variables import builder, builtin, misc

    protocol = getattr(variables, "object_protocol", None)  # a module; not in all
    dicts, of_dictionaries = variables.ConstDictVariable, getattr(variables, "UserDefinedDictVariable", None)
    instance_dicts = getattr(variables, "DunderDictVariable", None)
    patches: list[tuple[Any, str, Callable[[_Below], _Below]]] = [
        (dicts, "install_dict_keys_match_guard", _of_keys),
        (dicts, "tp_iter_impl", _of_keys),
        (dicts, "getitem_const_raise_exception_if_absent", _of_missing_keys),
        (instance_dicts, "install_dict_keys_match_guard", _of_keys),
        (instance_dicts, "install_dict_contains_guard", _of_keys_of_instances),
        (instance_dicts, "call_method", _of_copies),
        (builder.VariableBuilder, "_wrap", _of_values),  # from whose table of methods no patch is seen
        *((of_dictionaries, each, _of_attributes_of_dictionaries) for each in _READING),
        (builtin.BuiltinVariable, "call_isinstance", partial(of_registers, isinstance)),
        (builtin.BuiltinVariable, "call_issubclass", partial(of_registers, issubclass)),
        (builtin, "vt_identity_compare", _of_identity),
        (protocol, "vt_identity_compare", _of_identity),
        (getattr(misc, "GetAttrVariable", None), "call_method", _of_attributes_by_name),
        (InliningInstructionTranslator, "get_globals_source_and_value", _of_environment),
        (variables.TensorVariable, "method_attr__version", _of_versions),
        (variables.UserFunctionVariable, "get_code", of_functions),
        (InstructionTranslatorBase, "load_builtin", of_builtins),
        (OutputGraph, "compile_and_call_fx_graph", _of_trace),
        (_guards.Guard, "create", _of_lengths),
    ]
    for kind in ("UserFunctionVariable", "UserMethodVariable", "PythonModuleVariable"):
        for method in (*_READING, "call_obj_hasattr"):
            patches.append((getattr(variables, kind, None), method, partial(_of_attributes, method)))
    objects = getattr(variables, "UserDefinedObjectVariable", None)
    patches += [(objects, each, _of_missing_attributes) for each in _READING]
    partials = getattr(variables, "FunctoolsPartialVariable", None)
    patches += [(partials, each, partial(_of_partials, each)) for each in (*_READING, "call_obj_hasattr")]
    with ExitStack() as stack:
        for owner, name, replacement in patches:
            if (below := getattr(owner, name, None)) is not None:
                place = Attribute(owner, name)
                stack.enter_context(wrapped(place, replacement, this_thread=True, default=below))
        signs = {"is": _of_identity_by_sign, "is not": _of_identity_by_sign}
        if torch.__version__ < "2.13":  # later releases compare by ``vt_identity_compare`` where there is no equality
            signs |= {"==": _of_equality_by_sign, "!=": _of_equality_by_sign}
        for sign, replacement in signs.items():
            place = Item(symbolic_convert.compare_op_handlers, sign)
            stack.enter_context(wrapped(place, replacement, this_thread=True))
        yield


def _of_trace(below: _Below) -> _Below:
    def compile_graph(graph: Any, *args: Any, **kwargs: Any) -> Any:
        # Where Dynamo means to guard the order of keys, it may guard nothing of the keys.
        for source in tuple(graph.guard_on_key_order):
            _guard_keys(source)
        guard_classes(graph)
        guard_code()
        return below(graph, *args, **kwargs)

    return compile_graph


def _of_keys(below: _Below) -> _Below:
    def iterate(owner: Any, *args: Any) -> Any:
        _guard_keys(owner.source)
        return below(owner, *args)

    return iterate


def _guard_keys(source: Any) -> None:
    if can_change(source) and source.name != _KEYWORDS:
        guard_at(source, "keys", "keys in this order", _same_keys)


def _of_lengths(below: _Below) -> _Below:
    def create(guard: Any, builder: Any) -> Any:
        if guard.create_fn_name() == "SEQUENCE_LENGTH":
            value, name = builder.get(guard), guard.originating_source.name
            if (found := elements_of(value)) is not None and has_own(type(value), "__len__"):
                check, find = _same_count(type(value), found[0]), finder(name, builder.scope["G"])
                add_guard(builder, guard, lambda in_locals: check(find(in_locals)), f"what {name} holds")
                return None
        return below(guard, builder)

    return create


def _same_count(kind: type, count: int) -> Callable[[Any], bool]:
    def same(now: Any) -> bool:
        found = elements_of(now)
        return type(now) is kind and found is not None and found[0] == count

    return same


def _of_missing_keys(below: _Below) -> _Below:
    def look_up(owner: Any, tx: Any, key: Any) -> Any:
        if owner.source is not None and key not in owner:
            owner.install_dict_contains_guard(tx, [key])
        return below(owner, tx, key)

    return look_up


def _of_keys_of_instances(below: _Below) -> _Below:
    def contains(owner: Any, tx: Any, args: Any) -> Any:
        if can_change(owner.source) and args[0].is_python_constant():
            key = args[0].as_python_constant()
            guard_at(owner.source, f"has {key!r}", f"whether {key!r} is in", partial(_same_presence, key))
        return below(owner, tx, args)

    return contains


def _of_environment(below: _Below) -> _Below:
    """Dynamo takes what functions of Python's library read of their modules to stay as it is."""

    def find(owner: Any, name: str) -> Any:
        value, variable, source = below(owner, name)
        return value, variable, source.base if value is os and name == "environ" else source

    return find


def _of_copies(below: _Below) -> _Below:
    def call_method(owner: Any, tx: Any, name: str, *args: Any) -> Any:
        if name == "copy":
            owner.install_dict_keys_match_guard()
        return below(owner, tx, name, *args)

    return call_method


def _of_attributes_by_name(below: _Below) -> _Below:
    """On torch 2.11 attributes of an object are no dictionary of Dynamo's, and what is not there is not guarded."""

    def call_method(owner: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        asks = name in ("get", "__getitem__", "__contains__") and owner.name == "__dict__" and args
        if asks and args[0].is_python_constant() and can_change(source := owner.obj.source):
            key = args[0].as_python_constant()
            guard_at(source, f"has {key!r} in __dict__", f"whether vars has {key!r} of", partial(_same_in_vars, key))
        return below(owner, tx, name, args, kwargs)

    return call_method


def _same_in_vars(key: Any, value: Any) -> Callable[[Any], bool]:
    expected = key in vars(value)
    return lambda now: (key in vars(now)) == expected


def _same_keys(value: Any) -> Callable[[Any], bool]:
    keys = tuple(_keys_of(value))
    if all(type(each) is str for each in keys):
        return lambda now: tuple(_keys_of(now)) == keys
    expected = tuple(map(Held, keys))

    def check(now: Any) -> bool:
        found = tuple(_keys_of(now))
        return len(found) == len(expected) and all(map(Held.is_now, expected, found))

    return check


def _same_presence(key: Any, value: Any) -> Callable[[Any], bool]:
    expected = key in value
    return lambda now: (key in now) == expected


def _keys_of(value: Any) -> Iterator[Any]:
    if isinstance(value, collections.OrderedDict):
        return collections.OrderedDict.__iter__(value)  # whose order the dictionary below it does not know
    return dict.__iter__(value) if isinstance(value, dict) else iter(value)


def _of_attributes(method: str, below: _Below) -> _Below:
    def read(owner: Any, tx: Any, name: str) -> Any:
        value = vars(owner).get("fn", vars(owner).get("value"))
        if method == "call_obj_hasattr" or not _has(value, name):
            _guard_attribute(owner.source, value, name)
        return below(owner, tx, name)

    return read


def _of_missing_attributes(below: _Below) -> _Below:
    """What a default is given for, or ``hasattr`` asks, Dynamo guards itself."""
    from torch._dynamo.exc import ObservedAttributeError

    def read(owner: Any, tx: Any, name: str) -> Any:
        try:
            return below(owner, tx, name)
        except ObservedAttributeError:
            if can_change(owner.source):
                says = f"whether {name} is an attribute of"
                guard_at(owner.source, f"has attribute {name}", says, partial(_same_attribute_or_none, name))
            raise

    return read


def _of_partials(method: str, below: _Below) -> _Below:
    """Dynamo takes a ``functools.partial`` to have no attributes of its own."""
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ConstantVariable, VariableTracker

    def read(owner: Any, tx: Any, name: str) -> Any:
        known = of_this_trace(_PARTIALS) or {}
        value = known.get(owner.source.name) if owner.source is not None else None
        if value is None or owner.source is None:
            return below(owner, tx, name)
        _guard_attribute(owner.source, value, name)
        if name not in vars(value):
            return below(owner, tx, name)
        if method == "call_obj_hasattr":
            return ConstantVariable.create(True)
        return VariableTracker.build(tx, vars(value)[name], AttrSource(owner.source, name))

    return read


def _guard_attribute(source: Any, value: Any, name: str) -> None:
    says = f"whether {name} is an attribute of"
    if can_change(source):
        guard_at(source, f"has attribute {name}", says, partial(_same_attribute_or_none, name))
        return
    held, expected = Held(value), _has(value, name)
    guard_anywhere(
        ("attribute", id(value), name), f"{says} a {type(value).__name__}", lambda *_: _had(held, name, expected)
    )


def _same_attribute_or_none(name: str, value: Any) -> Callable[[Any], bool]:
    expected = _has(value, name)
    return lambda now: _has(now, name) == expected


def _had(held: Held, name: str, expected: bool) -> bool:
    return (value := held.get()) is None or _has(value, name) == expected


def _has(value: Any, name: str) -> bool:
    """Without what a module or an object may do where it is asked for something that it has not."""
    own: dict[str, Any] = getattr(value, "__dict__", _NONE)
    if name in own or hasattr(type(value), name):
        return True
    if isinstance(value, torch.nn.Module):
        return any(name in own[table] for table in ("_parameters", "_buffers", "_modules"))
    return isinstance(value, types.MethodType) and _has(value.__func__, name)


def _of_attributes_of_dictionaries(below: _Below) -> _Below:
    """Dynamo does not ask for them again where the dictionary's own entries are the same."""

    def read(owner: Any, tx: Any, name: str) -> Any:
        if can_change(owner.source) and name in getattr(owner.value, "__dict__", {}):
            guard_at(owner.source, f"attribute {name}", f"attribute {name} of", partial(_same_attribute, name))
        return below(owner, tx, name)

    return read


def _same_attribute(name: str, value: Any) -> Callable[[Any], bool]:
    if _is_entry(name, value):  # with which it changes, as in an output of a model of ``transformers``
        return partial(_is_entry, name)
    expected = Held(vars(value).get(name, value))
    return lambda now: expected.is_now(vars(now).get(name, now))


def _is_entry(name: str, now: Any) -> bool:
    """Whether an attribute is what the dictionary itself has under its name, which Dynamo guards."""
    return name in now and dict.get(now, name) is vars(now).get(name, now)


def _of_identity(below: _Below) -> _Below:
    def compare(left: Any, right: Any) -> Any:
        answer = below(left, right)
        if answer is not None and not (_is_constant(left) or _is_constant(right)):  # equal if it is one, as few are
            _guard_identity(left, right)
        return answer

    return compare


def _of_identity_by_sign(below: _Below) -> _Below:
    def compare(tx: Any, args: Any, *kwargs: Any) -> Any:
        _guard_identity(*args)
        return below(tx, args, *kwargs)

    return compare


def _of_equality_by_sign(below: _Below) -> _Below:
    """Objects without an equality of their own are equal if they are one."""
    from torch._dynamo.variables import UserDefinedObjectVariable

    def compare(tx: Any, args: Any, *kwargs: Any) -> Any:
        if all(isinstance(each.realize(), UserDefinedObjectVariable) for each in args):
            _guard_identity(*args)
        return below(tx, args, *kwargs)

    return compare


def _is_constant(variable: Any) -> bool:
    """Whether it is a class, a function or a single value, or not known yet."""
    from torch._dynamo.variables import LazyVariableTracker

    lazy = isinstance(variable, LazyVariableTracker) and not variable.is_realized()
    return lazy or variable.is_python_constant()


def _is_single(variable: Any) -> bool:
    """Whether what it is compared with is guarded by value: ``None``, a number, a text."""
    from torch._dynamo.variables import LazyVariableTracker

    if isinstance(variable, LazyVariableTracker) and not variable.is_realized():  # nor is it to be made for this
        return isinstance(variable.peek_value(), PLAIN)
    return variable.is_python_constant() and isinstance(variable.as_python_constant(), PLAIN)


def _guard_identity(one: Any, other: Any) -> None:
    if (
        one is other
        or not (can_change(one.source) and can_change(other.source))
        or _is_single(one)
        or _is_single(other)
    ):
        return
    left, right = one.source.name, other.source.name
    expected: list[bool] = []
    finds: list[Callable[[Mapping[str, Any]], Any]] = []

    def same(in_locals: Mapping[str, Any], in_globals: Mapping[str, Any]) -> bool:
        if not expected:  # asked once as soon as there are guards
            finds.append(finder(f"({left}) is ({right})", in_globals))
            expected.append(finds[0](in_locals))
        return finds[0](in_locals) == expected[0]

    guard_anywhere(("identity", left, right), f"whether {left} is {right}", same)


def _of_versions(_below: _Below) -> _Below:
    from torch._dynamo.exc import Unsupported

    def refuse(*_args: Any) -> Any:
        raise Unsupported(VERSION_READ)

    return refuse


def _of_values(below: _Below) -> _Below:
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.lists import DequeVariable

    def wrap(owner: Any, value: Any) -> Any:
        if is_offloaded(value):  # before Dynamo, which reads it
            raise Unsupported(OFFLOADED_READ)
        made = below(owner, value)
        if type(value) is float and value == 0 and can_change(owner.source):
            guard_at(owner.source, "sign", "the sign of zero", _same_sign)
        elif isinstance(made, DequeVariable) and isinstance(value, collections.deque):
            made.maxlen = ConstantVariable.create(value.maxlen)  # which Dynamo takes for none
            if can_change(owner.source):
                guard_at(owner.source, "maxlen", "maxlen", _same_length)
        elif (
            isinstance(value, partial) and owner.source is not None and (found := of_this_trace(_PARTIALS)) is not None
        ):
            found[owner.source.name] = value
        return made

    return wrap


def _same_length(value: collections.deque[Any]) -> Callable[[Any], bool]:
    expected = value.maxlen
    return lambda now: now.maxlen == expected


def _same_sign(value: float) -> Callable[[Any], bool]:
    expected = math.copysign(1, value)
    return lambda now: now != 0 or math.copysign(1, now) == expected
