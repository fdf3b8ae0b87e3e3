"""What ``make bench`` found: a sample of each benchmark's cases, run again and held against the committed result.

1. A sample *contradicts* the result where it misses a target that the result met, or where a case fails that did not.
2. A result is *stale* while its latest sample contradicts it. That sources have changed makes no result stale.
3. Whole numbers and verdicts are compared too and counted. Those that differ contradict nothing by themselves: which
   plan is chosen rests on seconds measured on the machine, and the plan's bytes with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.origin import BENCHMARKS, Origin

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
        origin: of the sample; its cases are those that ran again.
        targets: that its rows were held against.
        missed: those that were not met, each with its row, number and target.
        contradicted: what of the committed result did not come out again (definition 1).
        same: whole numbers and verdicts that are as committed.
        other: those that are not.
        held: date and commit of the last sample that contradicted nothing; empty where there was none.
    """

    name: str
    origin: Origin
    targets: int
    missed: tuple[str, ...]
    contradicted: tuple[str, ...]
    same: int
    other: int
    held: str = ""


def compared(name: str, sample: Mapping[str, Any], committed: Mapping[str, Any]) -> Checked:
    """A sample's result file, held against the committed one."""
    rows = sample["rows"]
    met = {(_key(row), each["what"]) for row in committed.get("rows", ()) for each in row["checks"] if each["passed"]}
    missed: list[str] = []
    contradicted: list[str] = []
    for row in rows:
        for check in row["checks"]:
            if not check["passed"]:
                what = f"{_shown(row)}: {check['what']} {check['value']}, not {check['relation']} {check['target']}"
                missed.append(what)
                if (_key(row), check["what"]) in met:
                    contradicted.append(what)
    failed_before = {each["case"] for each in committed.get("failures", ())}
    failures = [each for each in sample.get("failures", ()) if each["case"] not in failed_before]
    contradicted += [f"{each['case']} failed: {each['error']}" for each in failures]
    origins = [Origin.from_json(each) for each in sample["origins"]]
    cases = tuple(dict.fromkeys(case for each in origins for case in each.cases))
    origin = replace(origins[-1], changed=any(each.changed for each in origins), cases=cases)
    held = "" if contradicted else f"{origin.machine.get('date')} at {origin.commit[:7]}"
    targets = sum(len(row["checks"]) for row in rows)
    same, other = counted(rows, committed.get("rows", ()))
    return Checked(name, origin, targets, tuple(missed), tuple(contradicted), same, other, held)


def counted(ours: Iterable[dict[str, Any]], theirs: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """Of rows that both have, how many whole numbers and verdicts are the same, and how many are not.

    Seconds and what follows from them differ from machine to machine and are not counted.
    """
    known = {key: row["columns"] for row in theirs if (key := _key(row))}
    same = differ = 0
    for row in ours:
        columns = known.get(_key(row), {})
        for name, value in row["columns"].items():
            if isinstance(value, int) and name in columns:
                same, differ = (same + 1, differ) if columns[name] == value else (same, differ + 1)
    return same, differ


def _key(row: Mapping[str, Any]) -> str:
    """Which row it is; empty where no column says so."""
    columns = row["columns"]
    names = [name for name in NAMES if name in columns]
    return json.dumps([row["question"], *(columns[name] for name in names)]) if names else ""


def _shown(row: dict[str, Any]) -> str:
    columns = row["columns"]
    return ", ".join([str(row["question"]), *(str(columns[name]) for name in NAMES if name in columns)])


def write(samples: Iterable[Checked], path: Path = CHECKED) -> None:
    """Keep them for the page of benchmarks; a contradicted one keeps when its benchmark last came out the same."""
    before = {each.name: each.held for each in read(path)}
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [replace(each, held=each.held or before.get(each.name, "")) for each in samples]
    rows = [{**asdict(each), "origin": each.origin.to_json()} for each in kept]
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
                "contradicted": tuple(each["contradicted"]),
            }
        )
        for each in json.loads(path.read_text(encoding="utf-8"))
    ]
