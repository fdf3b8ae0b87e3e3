"""Tables and figures as text, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["listed", "mib", "percent", "ratio", "table"]

NONE = ""


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; what stands for nothing is left empty."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    lines += [f"| {' | '.join(_cell(each) for each in row)} |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value).replace("|", "\\|").replace("\n", " ")


def mib(value: float | None) -> str:
    return NONE if value is None else f"{value / 2**20:.1f} MiB"


def ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    """Of a number that is in percent already."""
    return NONE if value is None else f"{value:.2f} %"


def listed(items: Iterable[str], most: int) -> str:
    """A list of at most ``most`` lines, with how many more there are."""
    found = list(items)
    more = [f"- and {len(found) - most} more in the result file"] if len(found) > most else []
    return "\n".join([*(f"- {each}" for each in found[:most]), *more])
