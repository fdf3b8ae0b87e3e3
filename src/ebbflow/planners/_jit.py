"""The one way this package compiles: numba without objects, cached on disk, without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

__all__ = ["Ints", "Words", "inner", "jit"]

Ints = NDArray[np.int64]


class Words(Protocol):
    """A flat array of 64-bit integers, as compiled code sees it."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


Function = TypeVar("Function", bound=Callable[..., Any])


def inner(function: Function) -> Function:
    """Compile ``function`` for calls from compiled code only, which saves the way in from Python."""
    options: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "no_cpython_wrapper": True}
    return cast(Function, numba.njit(**options)(function))


def jit(function: Function) -> Function:
    """Compile ``function`` at its first call; the type checker sees it unchanged."""
    return cast(Function, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
