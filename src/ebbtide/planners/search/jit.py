"""The one way this package compiles: numba without objects, cached on disk, without the interpreter's lock.

Numba optimises and emits a compiled function again inside each of its callers, so a deep tree of calls costs far
more to compile than its lines. Two kinds of functions keep that small:
1. :func:`inner`, for a few lines: compiled into every caller.
2. :func:`apart`, for the rest: a C function of its own, compiled once at its first use. Compiled code links to it
   by name, Python calls it by address.

Both take the state as a bare pointer, which compiles several times faster than an array.

Numba's files are a cache like any other: what is wrong with one is a miss, and where there is no place for them
functions are compiled for this process alone (:class:`_Cache`). Numba itself raises in both cases. And numba trusts a
file as long as the function's own module has not changed; but what it inlines, the layout of the memory above all, is
from other modules, so here a file is good for the sources of all compiled code together (:func:`sources_digest`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, cast

import numba
import numpy as np
from llvmlite import binding  # pyright: ignore[reportMissingTypeStubs]
from numba.core import types
from numba.core.ccallback import CFunc
from numba.core.datamodel import models
from numba.core.sigutils import normalize_signature  # pyright: ignore[reportUnknownVariableType]
from numba.extending import register_model  # pyright: ignore[reportUnknownVariableType]
from numpy.typing import NDArray

from ebbtide.signals import raised_by_a_handler

__all__ = ["Ints", "Words", "apart", "compile_waiting", "inner", "sources_digest"]

Ints = NDArray[np.int64]


class Words(Protocol):
    """A flat array of 64-bit integers, as compiled code sees it: a pointer."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


Function = TypeVar("Function", bound=Callable[..., Any])
OPTIONS: dict[str, Any] = {"error_model": "numpy"}
# Names of annotations, the types of compiled code and those of calls from Python. A truth value travels as 0 or 1.
KINDS: dict[str, tuple[Any, Any]] = {
    "Words": (types.CPointer(types.int64), ctypes.c_void_p),
    "int": (types.int64, ctypes.c_int64),
    "bool": (types.int64, ctypes.c_int64),
    "float": (types.float64, ctypes.c_double),
    "None": (types.void, None),
}

COMPILED = ("chains", "search")
"""Folders of the library's planners with compiled code."""

_compiling = threading.RLock()


@contextlib.contextmanager
def _kept_going() -> Generator[None]:
    """Ignore errors raised inside, unless a signal's handler has raised them."""
    try:
        yield
    except Exception as error:
        if raised_by_a_handler(error):
            raise


class _Cache:
    """Numba's cache of one function, whose defects are misses.

    Args:
        cache: numba's, which finds, reads and writes the files.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def load_overload(self, *arguments: Any) -> Any:
        """The compiled function, or ``None``."""
        try:
            return self._cache.load_overload(*arguments)
        except Exception as error:  # files are pickles: a damaged one may raise anything
            if raised_by_a_handler(error):
                raise
            with _kept_going():
                self._cache.flush()  # or what is compiled now could not be added
            return None

    def save_overload(self, *arguments: Any) -> None:
        """Keep a compiled function, if that can be."""
        with _kept_going():  # likewise, and disks are full
            self._cache.save_overload(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _keep(compiled: Any, function: Callable[..., Any]) -> None:
    """Turn on the cache of ``function``, which numba is to compile."""
    with contextlib.suppress(RuntimeError):  # no locator: neither the source's folder nor the user's can be written
        compiled.enable_caching()
        found = cast(object, vars(compiled._cache)["_cache_file"])  # numba's own names for them
        files = vars(found)
        files["_source_stamp"] = (files["_source_stamp"], sources_digest(Path(function.__code__.co_filename).parent))
        compiled._cache = _Cache(compiled._cache)


@functools.cache
def sources_digest(own: Path) -> str:
    """A digest of all that code in the folder ``own`` may have compiled into it: that folder, and the library's own."""
    home = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in sorted({own, *(home / each for each in COMPILED)}):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def inner(function: Function) -> Function:
    """Compile ``function`` into its compiled callers."""
    options: dict[str, Any] = {**OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    compiled: Any = numba.njit(**options)(function)
    _keep(compiled, function)
    return cast(Function, compiled)


class _Apart(types.ExternalFunction):
    """A C function: to numba an external symbol, to Python a callable that compiles at its first call.

    Functions compile in the order of their definition, so that each finds the symbols that it calls. A symbol holds the
    name of the module: to numba two external functions of one symbol and signature are one and the same.
    """

    waiting: ClassVar[list[_Apart]] = []

    def __init__(self, function: Callable[..., Any]) -> None:
        kinds = [KINDS[kind] for kind in function.__annotations__.values()]
        self._function = function
        self._signature = kinds[-1][0](*(kind for kind, _ in kinds[:-1]))
        self._prototype = ctypes.CFUNCTYPE(kinds[-1][1], *(kind for _, kind in kinds[:-1]))
        self._call: Callable[..., Any] | None = None
        super().__init__(f"{function.__module__}.{function.__name__}".replace(".", "_"), self._signature)
        self.waiting.append(self)

    def _compile(self) -> None:
        signature = cast(Any, normalize_signature)(self._signature)
        self._compiled: Any = CFunc(self._function, signature, locals={}, options=OPTIONS)
        _keep(self._compiled, self._function)
        self._compiled.compile()
        add_symbol = cast(Callable[[str, int], None], binding.add_symbol)  # pyright: ignore[reportUnknownMemberType]
        add_symbol(self.symbol, self._compiled.address)
        self._call = cast(Any, self._prototype)(self._compiled.address)

    @classmethod
    def compile_next(cls) -> None:
        """Compile the one that was defined first."""
        cls.waiting[0]._compile()
        cls.waiting.pop(0)

    def __call__(self, *arguments: Any) -> Any:
        if self._call is None:
            with _compiling:
                while self._call is None:
                    self.compile_next()
        return self._call(*(each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments))


def compile_waiting() -> None:
    """Compile all functions that are apart and were not called yet."""
    with _compiling:
        while _Apart.waiting:
            _Apart.compile_next()


register_model(_Apart)(models.OpaqueModel)


def apart(function: Function) -> Function:
    """Compile ``function`` on its own; the type checker sees it unchanged."""
    return cast(Function, _Apart(function))
