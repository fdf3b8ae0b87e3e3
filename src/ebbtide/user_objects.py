"""Looking into other people's objects without running a line of their code.

A walk over a model, the arguments of a call or an optimizer meets objects of any class. They may forbid ``len()``, load
from disk what they are asked for, or compare to something that has no truth. So:
1. What a value *is* its type says. ``isinstance`` would ask the value for its ``__class__``: :func:`is_a`.
2. What a container *holds* is read by the functions of the built-in class that it derives from: :func:`elements_of`.
3. What any other object holds is in its dictionary and its slots, which the interpreter's own descriptors read:
   :func:`attributes_of`.
4. Classes are told apart by identity, never put into sets: a metaclass may have ``==`` and no hash.
"""

from __future__ import annotations

import collections
import gc
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard, TypeVar

__all__ = ["attributes_of", "builtin_of", "declares", "elements_of", "has_own", "is_a", "is_mapping"]

_T = TypeVar("_T")
_mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_namespace: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__


def _values_of(value: Any) -> Iterator[object]:
    mapping: type[Any] = dict
    return iter(mapping.values(value))


_BUILTIN: tuple[Any, ...] = (list, tuple, dict, set, frozenset, collections.deque)
_READERS: tuple[tuple[type, Callable[[Any], int], Callable[[Any], Iterator[object]]], ...] = tuple(
    (kind, kind.__len__, _values_of if kind is dict else kind.__iter__) for kind in _BUILTIN
)
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)  # of which no class can be derived
_FUNCTION = types.FunctionType
_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (complex, complex.__complex__),
    (str, str.__str__),
    (bytes, bytes.__bytes__),
)


def is_a(value: object, *kinds: type[_T]) -> TypeGuard[_T]:
    """Whether the type of ``value`` derives from one of ``kinds``, which are no abstract classes."""
    return issubclass(type(value), kinds)


def is_mapping(value: object) -> bool:
    """Whether the type of ``value`` derives from ``Mapping`` or ``dict``."""
    return _derives(type(value), Mapping) or issubclass(type(value), dict)


def _derives(kind: type, base: type) -> bool:
    """Whether ``base`` is among the bases of ``kind``; ``issubclass`` of an abstract one would ask for a hash."""
    return any(each is base for each in _mro(kind))


def declares(kind: type, name: str) -> bool:
    """Whether ``kind`` or a base of it has ``name`` in its body."""
    return any(name in _namespace(each) for each in _mro(kind))


def has_own(kind: type, name: str) -> bool:
    """Whether a class in Python has laid ``name`` over what ``kind`` has of its built-in base."""
    return type(next((_namespace(each)[name] for each in _mro(kind) if name in _namespace(each)), None)) is _FUNCTION


def elements_of(value: object) -> tuple[int, Iterator[object]] | None:
    """How many elements a container holds and what they are, of a mapping its values; ``None`` if it is none.

    Mappings of Python code are read by their attributes (:func:`attributes_of`), as other objects are.
    """
    kind: Any = type(value)
    held: Any = value
    if kind is tuple or kind is list:
        return len(held), iter(held)
    if kind is dict:
        return len(held), iter(held.values())
    if issubclass(kind, _BUILTIN):
        count, each = next((count, each) for base, count, each in _READERS if issubclass(kind, base))
        return count(value), each(value)
    if kind is types.MappingProxyType:
        return 1, iter(gc.get_referents(value))
    weak: Any = weakref.WeakValueDictionary
    if _derives(kind, weak):
        alive: list[object] = [held for each in weak.valuerefs(value) if (held := each()) is not None]
        return len(alive), iter(alive)
    return None


def attributes_of(value: object) -> Mapping[str, Any]:
    """The attributes that ``value`` itself has, in its dictionary and in slots of Python classes."""
    own: Mapping[str, Any] | None = None
    slots: dict[str, Any] = {}
    for kind in _mro(type(value)):
        names = _namespace(kind)
        found: Any = names.get("__dict__")
        if own is None and type(found) in _DESCRIPTORS:
            own = found.__get__(value)
        if "__slots__" in names:
            for name, each in names.items():
                if type(each) is types.MemberDescriptorType:
                    try:
                        slots.setdefault(name, each.__get__(value))
                    except AttributeError:  # not set
                        continue
    return {**slots, **(own or {})} if slots else own or {}


def builtin_of(value: object) -> int | float | complex | str | bytes | None:
    """The number, text or bytes that ``value`` is, of the built-in class itself; ``None`` if it is none of these."""
    kind = type(value)
    for base, convert in _SCALARS:
        if issubclass(kind, base):
            return value if kind is base or kind is bool else convert(value)  # type: ignore[return-value]
    return None
