"""What may follow a planner's name: ``tflms:version=1,n_tensors=40``, read and checked in this one place.

1. A planner declares its settings as a frozen dataclass whose fields are made by :func:`setting`, and registers it with
   ``planner(..., settings=...)``; it finds an instance in ``Problem.settings``.
2. A text is the name, a colon, and ``key=value`` pairs separated by commas. Keys are the fields' names. What is left
   out keeps its default.
3. A check over several fields is the dataclass's ``__post_init__``, which raises :class:`ValueError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from ebbtide.errors import UsageError
from ebbtide.names import did_you_mean
from ebbtide.units import parse_bytes

__all__ = ["base_name", "has_settings", "setting", "settings_from", "several_planners"]

_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class _Kind:
    """The kind of a setting's value: one of ``words``, a flag, bytes, or a whole number from ``least`` on."""

    least: int | None = None
    words: tuple[str, ...] = ()
    bytes: bool = False
    flag: bool = False
    free: str = ""

    def __str__(self) -> str:
        if self.free:
            return self.free
        if self.words or self.flag:
            return "|".join(self.words or _FLAGS)
        return "bytes from 0 on, such as 4096 or 2GiB" if self.bytes else f"a whole number from {self.least} on"


def setting(
    default: Any,
    *,
    least: int | None = None,
    words: tuple[str, ...] = (),
    bytes: bool = False,  # the name of its kind
    free: str = "",
) -> Any:
    """A field of a planner's settings.

    Args:
        default: its value where it is left out.
        least: of a whole number.
        words: it takes one of these; numbers among them are given as numbers.
        bytes: whether it is a number of bytes, with a unit or without.
        free: what any other text stands for; the dataclass checks it.
    """
    kind = _Kind(least, words, bytes, isinstance(default, bool), free)
    return field(default=default, metadata={"kind": kind})


def base_name(text: str) -> str:
    """The planner's name without its settings."""
    return text.partition(":")[0]


def has_settings(text: str) -> bool:
    """Whether anything follows the planner's name."""
    return ":" in text


def several_planners(text: str) -> list[str]:
    """Planners separated by commas, each with its settings: a piece ``key=value`` belongs to the planner before it."""
    found: list[str] = []
    for piece in (each.strip() for each in text.split(",")):
        if found and has_settings(found[-1]) and "=" in piece and not has_settings(piece.partition("=")[0]):
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return found


def settings_from(text: str, of: type[Any] | None) -> Any:
    """The settings that follow a planner's name.

    Args:
        text: as users give it, with a colon.
        of: the planner's dataclass; ``None`` if it takes no settings.

    Raises:
        UsageError: for an unknown key, a value that its key does not take, or values that do not go together, saying
            what is accepted.
    """
    name, _, rest = text.partition(":")
    if of is None:
        raise UsageError(
            f"planner {name!r} takes no settings, and {text!r} gives it some; accepted: {name!r}",
            argument="planner",
            value=text,
            accepted=(name,),
        )
    kinds: dict[str, _Kind] = {each.name: each.metadata["kind"] for each in _fields(of)}
    values: dict[str, Any] = {}
    for key, value in _pairs(text, name, rest, kinds):
        if key in values:
            raise _refusal(text, name, kinds, f"{key!r} is given twice")
        values[key] = _value(text, name, kinds, key, value)
    try:
        return of(**values)
    except ValueError as error:
        raise _refusal(text, name, kinds, str(error)) from None


def _fields(of: type[Any]) -> tuple[Field[Any], ...]:
    return fields(of)


def _pairs(text: str, name: str, rest: str, kinds: Mapping[str, _Kind]) -> Iterator[tuple[str, str]]:
    for pair in rest.split(","):
        key, equals, value = (each.strip() for each in pair.partition("="))
        if not equals or not key or not value:
            raise _refusal(text, name, kinds, f"{pair.strip()!r} is not key=value")
        if key not in kinds:
            raise _refusal(text, name, kinds, f"it has no {key!r}{did_you_mean(key, kinds)}")
        yield key, value


def _value(text: str, name: str, kinds: Mapping[str, _Kind], key: str, value: str) -> Any:
    kind = kinds[key]
    wrong = _refusal(text, name, kinds, f"{key}={value} is not accepted")
    if kind.free:
        return value
    if kind.words:
        if value not in kind.words:
            raise wrong
        return int(value) if value.isdecimal() else value
    if kind.flag:
        if value.lower() not in _FLAGS:
            raise wrong
        return _FLAGS[value.lower()]
    if kind.bytes and not value.isdecimal():
        try:
            return parse_bytes(value)
        except UsageError:
            raise wrong from None
    try:
        number = int(value)
    except ValueError:
        raise wrong from None
    if number < (kind.least or 0):
        raise wrong
    return number


def _refusal(text: str, name: str, kinds: Mapping[str, _Kind], why: str) -> UsageError:
    accepted = tuple(f"{key}={kind}" for key, kind in kinds.items())
    return UsageError(
        f"planner {text!r}: {why}; {name} accepts {'; '.join(accepted)}",
        argument="planner",
        value=text,
        accepted=accepted,
    )
