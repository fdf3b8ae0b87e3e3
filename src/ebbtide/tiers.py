"""Names of slower memory, as users give them: ``"host"``, ``"disk"``, ``"disk:PATH"``, or a list of these.

``"disk"`` is a directory below the user's cache directory, ``"disk:PATH"`` any other. A plan knows a tier by its name
alone: where the disk is concerns the machine that runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ebbtide.errors import UsageError
from ebbtide.files import cache_directory
from ebbtide.names import did_you_mean

__all__ = ["TIERS", "Tier", "parse_tiers"]

TIERS = ("host", "disk")
_FORMS = ('"host"', '"disk"', '"disk:PATH"', "a list of these", "None for no movement")


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier.

    Attributes:
        name: ``"host"`` or ``"disk"``.
        directory: of a disk tier; ``None`` for the host.
    """

    name: str
    directory: Path | None = None


def parse_tiers(value: object) -> tuple[Tier, ...]:
    """The tiers that ``value`` names; none for ``None`` and for an empty list.

    Raises:
        UsageError: for anything else than the forms above, and for one tier named twice.
    """
    if value is None:
        return ()
    names: list[object] = list(cast("list[object]", value)) if isinstance(value, list | tuple) else [value]
    tiers = tuple(_tier(name, names) for name in names)
    if len({tier.name for tier in tiers}) < len(tiers):
        raise _refusal(names, "; it names one tier twice")
    return tiers


def _tier(name: object, value: list[object]) -> Tier:
    if isinstance(name, Tier):
        return name
    if isinstance(name, str):
        kind, colon, path = name.partition(":")
        if kind == "disk" and (path or not colon):
            return Tier("disk", Path(path).expanduser().absolute() if path else cache_directory() / "tier")
        if name == "host":
            return Tier("host")
        raise _refusal(value, _meant(name, kind))
    raise _refusal(value, "")


def _meant(name: str, kind: str) -> str:
    """A word on what was probably meant by ``name``; empty if nothing is near."""
    if "," in name:
        return f"; did you mean {[each.strip() for each in name.split(',')]!r}?"
    if "/" in kind:
        return f"; did you mean {f'disk:{name}'!r}?"
    return did_you_mean(kind, TIERS)


def _refusal(names: list[object], near: str) -> UsageError:
    value = names[0] if len(names) == 1 else names
    return UsageError(
        f"tiers={value!r} is not accepted; tiers takes {', '.join(_FORMS[:-1])}, or {_FORMS[-1]}{near}",
        argument="tiers",
        value=value,
        accepted=_FORMS,
    )
