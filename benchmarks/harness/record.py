"""The record of a benchmark: rows of columns, each with the targets it is held against; JSON and text forms.

A row's columns are what was measured; a check is one number against one target. Both are plain data, so that a
child process can print them and a result file can be read without this package.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.origin import Origin, origin_now

__all__ = ["Check", "Record", "Row", "above", "at_least", "at_most", "holds", "machine_description"]


@dataclass(frozen=True)
class Check:
    """One number against one target."""

    what: str
    value: float | bool
    target: float | bool
    relation: str
    passed: bool

    def __str__(self) -> str:
        verdict = "pass" if self.passed else "FAIL"
        if self.relation == "is":
            return f"{verdict}: {self.what}"
        return f"{verdict}: {self.what} {self.value:.4g} {self.relation} {self.target:g}"


def at_most(what: str, value: float, target: float) -> Check:
    return Check(what, value, target, "<=", bool(value <= target))


def at_least(what: str, value: float, target: float) -> Check:
    return Check(what, value, target, ">=", bool(value >= target))


def above(what: str, value: float, target: float) -> Check:
    return Check(what, value, target, ">", bool(value > target))


def holds(what: str, value: bool) -> Check:
    return Check(what, bool(value), True, "is", bool(value))


@dataclass(frozen=True)
class Row:
    """What was measured in one configuration.

    Attributes:
        question: the table that the row belongs to.
        columns: what was measured, in order; bytes and seconds are raw numbers.
        checks: the targets it is held against; a row without any is there to compare with.
    """

    question: str
    columns: dict[str, Any]
    checks: tuple[Check, ...] = ()

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Row:
        return Row(data["question"], data["columns"], tuple(Check(**c) for c in data["checks"]))


VERSIONS = ("numpy", "highspy", "numba", "ortools", "transformers")


def machine_description() -> dict[str, Any]:
    """CPU, cores, memory, versions and date; nothing that names the machine."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{name: metadata.version(name) for name in VERSIONS if find_spec(name) is not None},
        "date": datetime.date.today().isoformat(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


@dataclass
class Record:
    """All rows of one run, and the cases that failed to give any.

    Attributes:
        name: of the benchmark.
        titles: heading of each question's table.
        settings: how it was run.
        origins: of the cases that other runs gave; those of this run have the origin of its start.
    """

    name: str
    titles: dict[str, str]
    settings: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=machine_description)
    rows: list[Row] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    case_seconds: dict[str, float] = field(default_factory=dict)
    origins: list[Origin] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start = origin_now(self.name, self.machine)

    @property
    def passed(self) -> bool:
        return not self.failures and all(row.passed for row in self.rows)

    @staticmethod
    def read(path: Path, titles: dict[str, str] | None = None) -> Record:
        """The record that :meth:`write` wrote; ``titles`` of today in place of those that it has."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return Record(
            data["benchmark"],
            data["titles"] if titles is None else titles,
            data["settings"],
            data["machine"],
            [Row.from_json(row) for row in data["rows"]],
            data["failures"],
            data["case_seconds"],
            [Origin.from_json(each) for each in data.get("origins", ())],
        )

    def every_origin(self) -> list[Origin]:
        """The origins of all cases, those of this run with them; only origins that some case still has."""
        known = {case for each in self.origins for case in each.cases}
        own = replace(self._start, cases=tuple(case for case in self.case_seconds if case not in known))
        return [each for each in (*self.origins, own) if each.cases]

    def take(self, other: Record) -> None:
        """Add another run's cases; those that this one has too are replaced."""
        again = {(row.question, _where(row)) for row in other.rows}

        def is_new(row: Row) -> bool:
            ran = f"{row.question}:{row.columns.get('case')}" in other.case_seconds
            return ran or (row.question, _where(row)) in again

        theirs = other.every_origin()
        mine = [replace(o, cases=tuple(c for c in o.cases if c not in other.case_seconds)) for o in self.every_origin()]
        self.origins = _joined([*mine, *theirs])
        self.rows = [row for row in self.rows if not is_new(row)] + other.rows
        self.failures = [each for each in self.failures if each["case"] not in other.case_seconds] + other.failures
        self.case_seconds = {**self.case_seconds, **other.case_seconds}

    def write(self, path: Path) -> None:
        """``path`` as JSON; ``make pages`` renders it."""
        data = {
            "benchmark": self.name,
            "titles": self.titles,
            "machine": self.machine,
            "settings": self.settings,
            "passed": self.passed,
            "origins": [each.to_json() for each in self.every_origin()],
            "case_seconds": self.case_seconds,
            "failures": self.failures,
            "rows": [row.to_json() for row in self.rows],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    def markdown(self) -> str:
        checks = [check for row in self.rows for check in row.checks]
        met = sum(check.passed for check in checks)
        facts = ", ".join(f"{key} {value}" for key, value in {**self.machine, **self.settings}.items())
        parts = [f"# {self.name}", f"{met} of {len(checks)} targets met; {len(self.failures)} cases failed.", facts]
        missed = [f"- {row.question}, {_where(row)}: {c}" for row in self.rows for c in row.checks if not c.passed]
        missed += [f"- {failure['case']}: {failure['error']}" for failure in self.failures]
        if missed:
            parts.append("Missed:\n\n" + "\n".join(missed))
        for question, title in self.titles.items():
            rows = [row for row in self.rows if row.question == question]
            if rows:
                parts.append(f"## {title}\n\n{table(rows)}")
        return "\n\n".join(parts) + "\n"


def _joined(origins: Iterable[Origin]) -> list[Origin]:
    """Those that differ in nothing but their cases as one."""
    found: dict[str, Origin] = {}
    for each in origins:
        key = json.dumps(replace(each, cases=()).to_json(), sort_keys=True)
        known = found.get(key)
        found[key] = each if known is None else replace(known, cases=(*known.cases, *each.cases))
    return [each for each in found.values() if each.cases]


def _where(row: Row) -> str:
    names = ("case", "method", "budget", "threads")
    return " ".join(str(row.columns[name]) for name in names if name in row.columns)


def table(rows: Iterable[Row]) -> str:
    """Rows as a Markdown table; columns in order of first appearance, targets last."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row.columns))
    body = [[_cell(name, row.columns.get(name)) for name in names] + ["; ".join(map(str, row.checks))] for row in rows]
    header = [*(name.removesuffix("_bytes").replace("_", " ") for name in names), "targets"]
    widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *body]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def _cell(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**20:.2f} MiB"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
