"""The one way this package compiles: numba without objects, cached on disk, without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

__all__ = ["Ints", "jit"]

Ints = NDArray[np.int64]

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(function: Function) -> Function:
    """Compile ``function`` at its first call; the type checker sees it unchanged."""
    return cast(Function, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
