"""What is found out of a captured step, or of a part of one, is found out once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

__all__ = ["once"]

Of = TypeVar("Of")
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


def once(function: Callable[Concatenate[Of, Rest], Result]) -> Callable[Concatenate[Of, Rest], Result]:
    """``function`` of an object that nobody changes, whose results are kept in that object and must not be changed.

    Many rewrites are tried of one step, and each asks for the same. Kept by identity: captured steps compare by all
    that they hold. What else it takes, by position, is told apart by its value.
    """
    key = f"_{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def known(of: Of, *rest: Rest.args, **none: Rest.kwargs) -> Result:
        kept: dict[Any, Result] = vars(of).setdefault(key, {})
        if rest not in kept:
            kept[rest] = function(of, *rest, **none)
        return kept[rest]

    return known
