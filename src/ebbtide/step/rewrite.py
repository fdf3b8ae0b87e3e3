"""A part of a captured step that something else takes the place of, with the same bits: as plain data, for plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.step.program import Program

__all__ = ["Rewrite", "Rewritten", "in_words"]


@dataclass(frozen=True)
class Rewrite:
    """One part.

    Attributes:
        rule: what kind of part, e.g. ``"linear-cross-entropy"``.
        at: name of an op of the captured program by which it is found.
        where: the module or line, for people.
        form: what takes its place.
        settings: of the form: sizes of slices, how many ``places`` it has where it is more than one, and the like.
        facts: what it takes for granted of the kernels, in words.
    """

    rule: str
    at: str
    where: str
    form: str
    settings: tuple[tuple[str, int], ...]
    facts: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {value}" for name, value in self.settings)
        return f"{self.rule} at {self.where or self.at}: {self.form} ({sizes})"

    def __getitem__(self, setting: str) -> int:
        return dict(self.settings)[setting]

    def to_json(self) -> dict[str, Any]:
        """This record as plain data."""
        return {
            "rule": self.rule,
            "at": self.at,
            "where": self.where,
            "form": self.form,
            "settings": dict(self.settings),
            "facts": list(self.facts),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Rewrite:
        """What :meth:`to_json` gave."""
        return Rewrite(
            rule=str(data["rule"]),
            at=str(data["at"]),
            where=str(data["where"]),
            form=str(data["form"]),
            settings=tuple((str(name), int(value)) for name, value in data["settings"].items()),
            facts=tuple(map(str, data["facts"])),
        )


def in_words(rewrites: Iterable[Rewrite]) -> list[str]:
    """Each of ``rewrites``; those that are of many places, by rule and form together."""
    words: list[str] = []
    places: dict[str, int] = {}
    for each in rewrites:
        many = dict(each.settings).get("places")
        if many is None:
            words.append(str(each))
        else:
            sizes = [
                f"{name} {value}" for name, value in each.settings if name in ("rows", "columns", "entries") and value
            ]
            kind = f"{each.rule}: {each.form}" + (f" by {', '.join(sizes)}" if sizes else "")
            places[kind] = places.get(kind, 0) + many
    return [*words, *(f"{kind} ({many} places)" for kind, many in places.items())]


@dataclass(frozen=True)
class Rewritten:
    """How a program comes from the captured one, of which budgets in percent and overheads are.

    Attributes:
        rewrites: one or more.
        seconds: of the captured step, unplanned.
        above_bytes: its peak above the start.
    """

    rewrites: tuple[Rewrite, ...]
    seconds: float
    above_bytes: int

    def overhead_of(self, overhead: float | None, program: Program) -> float | None:
        """What is an overhead over ``program`` unplanned, over the captured step."""
        if overhead is None or not self.seconds:
            return None
        return (1 + overhead) * program.seconds / self.seconds - 1

    def to_json(self) -> dict[str, Any]:
        """This record as plain data."""
        return {
            "rewrites": [each.to_json() for each in self.rewrites],
            "seconds": self.seconds,
            "above_bytes": self.above_bytes,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Rewritten:
        """What :meth:`to_json` gave."""
        return Rewritten(
            tuple(map(Rewrite.from_json, data["rewrites"])), float(data["seconds"]), int(data["above_bytes"])
        )
