"""Checks of what users give: each names the argument, shows the value as it was typed, and says what would do.

A check is a function of an argument's name and value that returns, or raises :class:`~ebbtide.errors.UsageError`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from numbers import Integral, Real

from ebbtide.errors import UsageError
from ebbtide.names import did_you_mean

__all__ = ["Check", "flag", "function", "one_of", "refusal", "seconds", "shown", "text", "whole"]

Check = Callable[[str, object], None]


def refusal(argument: str, value: object, *accepted: str, near: str = "") -> UsageError:
    """The error for a ``value`` that is none of ``accepted``.

    Args:
        argument: as it is called.
        value: what was given.
        accepted: what would do, each as one would type or say it.
        near: said last: what may have been meant.
    """
    return UsageError(
        f"{argument}={shown(value)} is not accepted; {argument} takes {' or '.join(accepted)}{near}",
        argument=argument,
        value=value,
        accepted=accepted,
    )


def shown(value: object) -> str:
    """A value as it was typed; of an object with a long text, its type."""
    typed = repr(value)
    return typed if len(typed) <= 80 and "\n" not in typed else f"<{type(value).__name__}>"


def whole(least: int, most: int | None = None) -> Check:
    """Takes whole numbers from ``least`` to ``most``."""

    def check(argument: str, value: object) -> None:
        number = int(value) if not isinstance(value, bool) and isinstance(value, Integral) else least - 1
        if least <= number and (most is None or number <= most):
            return
        raise refusal(argument, value, f"an int from {least} {'on' if most is None else f'to {most}'}")

    return check


def seconds(argument: str, value: object) -> None:
    """Takes a number of seconds, or ``None``."""
    if value is None or (not isinstance(value, bool) and isinstance(value, Real) and 0 <= float(value) < math.inf):
        return
    raise refusal(argument, value, "seconds, 0 or more", "None for no limit")


def flag(argument: str, value: object) -> None:
    """Takes ``True`` or ``False``."""
    if not isinstance(value, bool):
        raise refusal(argument, value, "True", "False")


def text(argument: str, value: object) -> None:
    """Takes a ``str``."""
    if not isinstance(value, str):
        raise refusal(argument, value, "a str")


def one_of(*words: object) -> Check:
    """Takes one of ``words``; a ``True`` among them is not the number 1."""

    def check(argument: str, value: object) -> None:
        if any(value == word and isinstance(value, type(word)) for word in words):
            return
        near = did_you_mean(value, [each for each in words if isinstance(each, str)]) if isinstance(value, str) else ""
        accepted = (f'"{each}"' if isinstance(each, str) else repr(each) for each in words if each is not None)
        raise refusal(argument, value, *accepted, near=near)

    return check


def function(what: str) -> Check:
    """Takes ``what``, which is something to call, or ``None``."""

    def check(argument: str, value: object) -> None:
        if inspect.isclass(value):
            raise refusal(argument, value, what, near=f"; {value.__name__} is a class: make an object of it first")
        if value is not None and not callable(value):
            raise refusal(argument, value, what)

    return check
