"""What ``make bench`` found: for each benchmark some cases with today's sources, held against the committed figures.

A committed result is stale soon, as its benchmark measures much of ``src/ebbtide`` and takes hours. This says of a
sample of it whether targets still hold, and whether its bytes and counts are still those that are committed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.origin import BENCHMARKS, Origin, module_hashes

__all__ = ["CHECKED", "Checked", "compared", "counted", "read", "write"]

RESULTS = BENCHMARKS / "results"
CHECKED = RESULTS / "checked" / "checked.json"
NAMES = ("case", "method", "planner", "budget", "f", "share", "threads", "call")
"""Columns that say which row it is."""


@dataclass(frozen=True)
class Checked:
    """A sample of one benchmark.

    Attributes:
        name: of the benchmark.
        origin: what it was made from; its cases are those of the sample.
        targets: that its rows were held against.
        missed: those that were not met, each with its row, number and target.
        same: whole numbers and verdicts that are as committed.
        other: those that are not.
        failures: of cases, each with its error.
    """

    name: str
    origin: Origin
    targets: int
    missed: tuple[str, ...]
    same: int
    other: int
    failures: tuple[str, ...] = ()

    @property
    def is_current(self) -> bool:
        """Whether its sources are today's."""
        return not self.origin.differing(module_hashes(self.name))


def compared(name: str, found: Mapping[str, Any], committed: Sequence[dict[str, Any]]) -> Checked:
    """A sample's result file, held against the committed rows."""
    rows = found["rows"]
    checks = [(row, check) for row in rows for check in row["checks"]]
    missed = tuple(
        f"{_shown(row)}: {check['what']} {check['value']}, not {check['relation']} {check['target']}"
        for row, check in checks
        if not check["passed"]
    )
    origins = [Origin.from_json(each) for each in found["origins"]]
    newest = origins[-1]
    cases = tuple(dict.fromkeys(case for each in origins for case in each.cases))
    older = next((each for each in origins if each.modules != newest.modules), newest)
    origin = Origin(
        older.commit, any(e.changed for e in origins), older.modules, newest.machine, newest.seeds, "", cases
    )
    failures = tuple(f"{each['case']}: {each['error']}" for each in found.get("failures", ()))
    return Checked(name, origin, len(checks), missed, *counted(rows, committed), failures)


def counted(ours: Iterable[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Of rows that both have, how many whole numbers and verdicts are the same, and how many are not.

    Seconds and what follows from them differ from machine to machine and are not counted.
    """
    known = {key: row["columns"] for row in theirs if (key := _key(row)) is not None}
    same = differ = 0
    for row in ours:
        columns = known.get(_key(row) or "", {})
        for name, value in row["columns"].items():
            if isinstance(value, int) and name in columns:
                same, differ = (same + 1, differ) if columns[name] == value else (same, differ + 1)
    return same, differ


def _key(row: dict[str, Any]) -> str | None:
    columns = row["columns"]
    names = [name for name in NAMES if name in columns]
    return json.dumps([row["question"], *(columns[name] for name in names)]) if names else None


def _shown(row: dict[str, Any]) -> str:
    columns = row["columns"]
    return ", ".join([str(row["question"]), *(str(columns[name]) for name in NAMES if name in columns)])


def write(found: Iterable[Checked], path: Path = CHECKED) -> None:
    """Keep them, for the page of benchmarks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(each), "origin": each.origin.to_json()} for each in found]
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def read(path: Path = CHECKED) -> list[Checked]:
    """What is kept; nothing where there is none."""
    if not path.exists():
        return []
    return [
        Checked(
            **{
                **each,
                "origin": Origin.from_json(each["origin"]),
                "missed": tuple(each["missed"]),
                "failures": tuple(each["failures"]),
            }
        )
        for each in json.loads(path.read_text(encoding="utf-8"))
    ]
