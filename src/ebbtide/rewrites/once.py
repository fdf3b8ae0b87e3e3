"""What is found out of a captured step, or of a part of one, is found out once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["once"]

Of = TypeVar("Of")
Result = TypeVar("Result")


def once(function: Callable[[Of], Result]) -> Callable[[Of], Result]:
    """``function`` of one object that nobody changes, whose result is kept in that object and must not be changed.

    Many rewrites are tried of one step, and each asks for the same. Kept by identity: captured steps compare by all
    that they hold.
    """
    key = f"_{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def known(of: Of) -> Result:
        kept: dict[str, Any] = vars(of)
        if key not in kept:
            kept[key] = function(of)
        return cast("Result", kept[key])

    return known
