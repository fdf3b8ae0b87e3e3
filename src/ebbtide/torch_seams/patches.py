"""Scoped replacements of what torch or Python own: one mechanism for every patch that the whole process sees.

Definitions:
1. A *place* is an attribute of an object, an entry of a mapping, or a setting of one of torch's config modules.
2. A patch is *open* between its :meth:`Patch.open` and its :meth:`Patch.close`. It is closed by its ``with`` block,
   or by hand, or when it is garbage: whoever forgets it, or is interrupted while opening it, leaves nothing behind.
3. What an open patch lays at its place is its replacement, or for a function a *gate*: it calls the replacement, and
   once the patch is closed, what the patch found there. A patch for one thread has a gate that calls the replacement
   on the thread that opened it and what it found on every other.
4. Patches of one place may close in any order. The newest gives the place back what it found; an older one leaves
   what it found to the patch above it.
5. *Exactly* what was found is put back: the same object, or nothing where there was nothing.
6. If somebody else put something at the place in between, theirs stays. A wrapper of theirs that still calls our gate
   reaches what the patch had found; and if they put our gate back later, the next patch looks through it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from ebbtide.deferred_queue import DeferredQueue

__all__ = [
    "Attribute",
    "Item",
    "Patch",
    "PatchTarget",
    "Setting",
    "handing_on",
    "open_patches",
    "patched",
    "places",
    "wrapped",
]


class _Nothing:
    """What lies at a place where nothing lies."""

    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


class PatchTarget(Protocol):
    """What a patch replaces (definition 1)."""

    @property
    def key(self) -> tuple[object, ...]:
        """What two places have in common if they are one."""
        ...

    def read(self) -> Any:
        """What lies there itself, nothing inherited."""
        ...

    def write(self, value: Any) -> None:
        """Lay ``value`` there, or clear the place of what lies there if it is what :meth:`read` gives for nothing."""
        ...


@dataclass(frozen=True, eq=False)
class Attribute:
    """An attribute in the ``__dict__`` of a module, a class or an object."""

    owner: Any
    name: str

    @property
    def key(self) -> tuple[object, ...]:
        """Owner and name."""
        return (id(self.owner), self.name)

    def read(self) -> Any:
        """What lies there."""
        return vars(self.owner).get(self.name, _NOTHING)

    def write(self, value: Any) -> None:
        """Lay ``value`` there."""
        if value is not _NOTHING:
            setattr(self.owner, self.name, value)
        elif self.read() is not _NOTHING:
            delattr(self.owner, self.name)


@dataclass(frozen=True, eq=False)
class Item:
    """An entry of a mapping, ``os.environ`` among them."""

    owner: MutableMapping[Any, Any]
    name: Any

    @property
    def key(self) -> tuple[object, ...]:
        """Owner and name."""
        return (id(self.owner), self.name)

    def read(self) -> Any:
        """What lies there."""
        return self.owner.get(self.name, _NOTHING)

    def write(self, value: Any) -> None:
        """Lay ``value`` there."""
        if value is not _NOTHING:
            self.owner[self.name] = value
        else:
            self.owner.pop(self.name, None)


@dataclass(frozen=True, eq=False)
class Setting:
    """A setting of a torch config module.

    From 2.12 on torch keeps a value per thread, in a context variable: there a setting is a place of the thread that
    made it, and no other thread touches it. In 2.11 a value is the whole process's, and every thread sees a patch.
    """

    owner: Any
    name: str
    thread: int | None = None

    def __post_init__(self) -> None:
        if self.is_of_thread:
            object.__setattr__(self, "thread", threading.get_ident())

    @property
    def is_of_thread(self) -> bool:
        """Whether each thread has a value of its own, by what torch keeps values in."""
        entry = self.owner._config[self.name]
        return isinstance(getattr(entry, "user_override", None), ContextVar)

    @property
    def key(self) -> tuple[object, ...]:
        """Owner, name and thread."""
        return (id(self.owner), self.name, self.thread)

    def read(self) -> Any:
        """What lies there for the thread; nothing on any other."""
        return getattr(self.owner, self.name) if self.thread in (None, threading.get_ident()) else _NOTHING

    def write(self, value: Any) -> None:
        """Lay ``value`` there."""
        setattr(self.owner, self.name, value)


@dataclass(eq=False)
class _Layer:
    """One open patch of one place, apart from its handle, which may be garbage."""

    place: PatchTarget
    default: Callable[..., Any] | None = None
    found: Any = _NOTHING
    laid: Any = _NOTHING
    active: bool = False
    lasting: bool = False

    def below(self, *args: Any, **kwargs: Any) -> Any:
        """Call what lies below this layer, or its default where nothing does."""
        function = self.default if self.found is _NOTHING else self.found
        assert function is not None, f"nothing lies below the patch of {self.place}"
        return function(*args, **kwargs)


_turns = DeferredQueue()
_layers: dict[tuple[object, ...], list[_Layer]] = {}
_ever: dict[tuple[object, ...], PatchTarget] = {}


def _same(one: Any, other: Any) -> bool:
    # The environment makes a new string whenever it is asked.
    return one is other or (isinstance(one, str) and one == other)


def _lay(layer: _Layer) -> None:
    """Open; interrupted anywhere, :func:`_take_off` undoes what has been done."""
    place = layer.place
    _ever.setdefault(place.key[:2], place)
    _layers.setdefault(place.key, []).append(layer)
    found = place.read()
    while isinstance(gated := getattr(found, "_ebbtide_layer", None), _Layer) and not gated.active:
        found = gated.found
    layer.found = found
    if callable(found) and hasattr(layer.laid, "_ebbtide_layer"):
        functools.update_wrapper(layer.laid, found)
        layer.laid._ebbtide_layer = layer
    layer.active = True
    place.write(layer.laid)


def _remove(layer: _Layer) -> None:
    """Close; done twice, or interrupted and done again, it is done once."""
    layer.active = False
    place = layer.place
    stack = _layers.get(place.key, [])
    if layer in stack:
        position = stack.index(layer)
        if position + 1 < len(stack):
            above = stack[position + 1]
            if _same(above.found, layer.laid):
                above.found = layer.found
        elif _same(place.read(), layer.laid):
            place.write(layer.found)
        stack.remove(layer)
    if not stack:
        _layers.pop(place.key, None)


def _close(layer: _Layer) -> None:
    """Called by the garbage collector as well."""
    _turns.do(functools.partial(_remove, layer))


class Patch:
    """One replacement at one place, open inside its ``with`` block; made by :func:`patched` and :func:`wrapped`.

    Args:
        layer_of: from a place to a new layer of it.
        place: where.
    """

    def __init__(self, place: PatchTarget, layer_of: Callable[[PatchTarget], _Layer]) -> None:
        self._place = place
        self._layer_of = layer_of
        self._end: weakref.finalize[[_Layer], Patch] | None = None
        self._layer: _Layer | None = None

    @property
    def is_open(self) -> bool:
        """Whether the replacement is in force."""
        return self._layer is not None

    def open(self) -> Patch:
        """Lay the replacement.

        Raises:
            RuntimeError: if this patch is open.
        """
        if self._layer is not None:
            raise RuntimeError(f"the patch of {self._place} is open already")
        layer = self._layer_of(self._place)
        self._end = weakref.finalize(self, _close, layer)
        self._end.atexit = False
        self._layer = layer
        try:
            _turns.now(functools.partial(_lay, layer))
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Take it off; does nothing if it is not open."""
        if self._layer is None:
            return
        _close(self._layer)
        self._layer = None
        if self._end is not None:
            self._end.detach()

    def __enter__(self) -> Patch:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def patched(place: PatchTarget, value: Any) -> Patch:
    """A patch that lays ``value``, on all threads."""
    return Patch(place, lambda where: _Layer(where, laid=value))


def wrapped(
    place: PatchTarget,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    *,
    this_thread: bool = False,
    default: Callable[..., Any] | None = None,
    lasting: bool = False,
) -> Patch:
    """A patch of a function.

    Args:
        place: of a function, or of nothing if there is a ``default``.
        make: from what lies below, as a function, to what is to be called instead. While the patch is open, the two
            must not keep the patch alive, or it is never garbage.
        this_thread: whether only the thread that opens the patch is to see it.
        default: what lies below where nothing does.
        lasting: whether it stays for as long as something lives, and not for a while.
    """

    def layer_of(where: PatchTarget) -> _Layer:
        layer = _Layer(where, default, lasting=lasting)
        replacement = make(layer.below)
        thread = threading.get_ident() if this_thread else None

        def gate(*args: Any, **kwargs: Any) -> Any:
            if layer.active and (thread is None or thread == threading.get_ident()):
                return replacement(*args, **kwargs)
            return layer.below(*args, **kwargs)

        gate._ebbtide_layer = layer  # type: ignore[attr-defined]
        layer.laid = gate
        return layer

    return Patch(place, layer_of)


def handing_on(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` for what stands for it without a patch: what goes wrong in it is none of ours (``faults``)."""

    def below(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return below


def places() -> list[PatchTarget]:
    """Every place that has been patched in this process: what tests hold against what was there before."""
    return _turns.now(lambda: list(_ever.values()))


def open_patches(*, lasting: bool = False) -> int:
    """How many patches are open, for a while or as long as something lives."""
    return _turns.now(lambda: sum(layer.lasting == lasting for stack in _layers.values() for layer in stack))
