"""Where figures come from: the version that was measured, its commit, the date and machine, and the seeds.

An origin is of cases, since a result may be put together from several runs. ``SEEDS`` of a benchmark, a literal at the
top of its file, says what it draws random numbers from.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Origin", "cases_of_this_version", "origin_now", "seeds_of", "version_now"]

BENCHMARKS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Origin:
    """What some cases of a result were made from.

    Attributes:
        commit: that was checked out; empty where git could not tell.
        changed: whether files of ``src`` or ``benchmarks`` differed from that commit.
        version: of the library.
        machine: it was made on, with versions of packages and the date.
        seeds: of the benchmark.
        cases: that it holds for.
    """

    commit: str
    changed: bool
    version: str
    machine: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, Any] = field(default_factory=dict)
    cases: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "cases": list(self.cases)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Origin:
        return Origin(**{**data, "cases": tuple(data["cases"])})

    @property
    def is_of_this_commit(self) -> bool:
        """Whether it was made with exactly what is checked out now, as far as git can tell."""
        return bool(self.commit) and not self.changed and (self.commit, False) == _checked_out()


@functools.cache
def version_now() -> str:
    """The version that ``pyproject.toml`` names."""
    text = (BENCHMARKS.parent / "pyproject.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["version"])


@functools.cache
def seeds_of(name: str) -> dict[str, Any]:
    """``SEEDS`` of the benchmark ``name``, read without running it; empty where there are none."""
    path = BENCHMARKS / f"{name}.py"
    nodes = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
    for node in nodes:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SEEDS":
            return ast.literal_eval(node.value)
    return {}


def origin_now(name: str, machine: Mapping[str, Any]) -> Origin:
    """The origin of what the benchmark ``name`` measures from here on."""
    return Origin(*_checked_out(), version_now(), dict(machine), dict(seeds_of(name)))


def cases_of_this_version(path: Path) -> set[str]:
    """Cases of the result at ``path`` that were made with this version; none where there is no such file."""
    if not path.exists():
        return set()
    known = [Origin.from_json(each) for each in json.loads(path.read_text(encoding="utf-8")).get("origins", ())]
    return {case for each in known if each.version == version_now() for case in each.cases}


def _checked_out() -> tuple[str, bool]:
    """The commit, and whether sources differ from it."""
    changed = bool(_git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results"))
    return _git("rev-parse", "HEAD"), changed


def _git(*arguments: str) -> str:
    """What git says, or nothing where it is not there or this is no checkout of it."""
    command = ["git", "-C", str(BENCHMARKS.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
