"""Copies and pickles of a fitted model, which are plain models and are made as their class says.

A fitted model's class is a generated subclass of its own. So
1. what ``__reduce_ex__`` gives, the class's own or what Python derives from ``__reduce__``, ``__getstate__`` and
   ``__getnewargs__``, names the model's own class wherever it names the generated one;
2. what a ``__deepcopy__`` or ``__copy__`` of the class makes has its own class again;
3. ``copy.deepcopy`` says once for each class that what it makes is planned no more. A pickle is said nothing of: it may
   be read where nothing is fitted.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.faults import users_level

__all__ = ["copying"]

_COPIERS = ("__deepcopy__", "__copy__")


def make(kind: Any, *args: Any) -> Any:
    """What ``copyreg.__newobj__`` does; pickle wants that one to name the class that the object has."""
    return kind.__new__(kind, *args)


def make_with_names(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``copyreg.__newobj_ex__`` does, likewise."""
    return kind.__new__(kind, *args, **kwargs)


_MAKERS: dict[Any, Callable[..., Any]] = {
    getattr(copyreg, "__newobj__"): make,  # noqa: B009 - the type checker's idea of copyreg has no such name
    getattr(copyreg, "__newobj_ex__"): make_with_names,  # noqa: B009 - likewise
}


_told: weakref.WeakSet[type] = weakref.WeakSet()


def _warn_of_copy(plain: type[torch.nn.Module]) -> None:
    """Say of a copy what it is (definition 3)."""
    if plain not in _told:
        _told.add(plain)
        warnings.warn(
            f"this copy of a fitted {plain.__name__} is plain, without a budget: ebbtide.fit(copy, budget) plans "
            "its training too; an average or a teacher, which is not trained, needs no plan",
            stacklevel=users_level(),
        )


def copying(plain: type[torch.nn.Module], is_fitted: Callable[[object], bool]) -> dict[str, Callable[..., Any]]:
    """The methods by which objects of a generated subclass of ``plain`` are copied.

    Args:
        plain: the model's own class.
        is_fitted: whether an object is fitted itself, and keeps its class.
    """

    def reduce(self: torch.nn.Module, protocol: Any) -> Any:
        caller = inspect.currentframe()
        if caller is not None and caller.f_back is not None and caller.f_back.f_code is copy.deepcopy.__code__:
            _warn_of_copy(plain)
        # Python's own way has needed protocol 2 since there are classes that make objects by ``__new__`` alone.
        reduced = plain.__reduce_ex__(self, max(2, protocol))
        if not isinstance(reduced, tuple):
            return reduced
        function, args, *rest = reduced
        function, args = _named(function), tuple(_named(each) for each in args)
        return (_MAKERS.get(function, function), args, *rest)

    def _named(value: Any) -> Any:
        is_ours = isinstance(value, type) and plain in value.__bases__ and "_ebbtide_plain" in vars(value)
        return plain if is_ours else value

    def copier(name: str) -> Callable[..., Any]:
        theirs = getattr(plain, name)

        @functools.wraps(theirs)
        def copied(self: torch.nn.Module, *args: Any) -> Any:
            made = theirs(self, *args)
            if made is not self and _named(type(made)) is plain and not is_fitted(made):
                made.__class__ = plain
                if name == "__deepcopy__":
                    _warn_of_copy(plain)
            return made

        return copied

    own = {name: copier(name) for name in _COPIERS if hasattr(plain, name)}
    return {"__reduce_ex__": reduce, **own}
