"""Result files as data, and whether they are of today's sources.

A result is *current* if all parts of ``src/ebbtide`` that its benchmark measures have the hashes that its file has,
*stale* if one differs for some of its cases. Only sources are compared, so that the answer needs no git.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.origin import AFTERWARDS, BENCHMARKS, Origin, module_hashes

__all__ = ["RESULTS", "Result", "all_results", "question_of", "without_peer"]

RESULTS = BENCHMARKS / "results"


@dataclass(frozen=True)
class Result:
    """One result file.

    Attributes:
        name: of the file.
        benchmark: whose it is.
        data: as written.
        today: hashes of the parts that the benchmark measures.
    """

    name: str
    benchmark: str
    data: dict[str, Any]
    today: dict[str, str]

    @cached_property
    def origins(self) -> tuple[Origin, ...]:
        return tuple(Origin.from_json(each) for each in self.data.get("origins", ()))

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.data.get("rows", [])

    def of(self, question: str) -> list[dict[str, Any]]:
        """The columns of a question's rows."""
        return [row["columns"] for row in self.rows if row["question"] == question]

    @property
    def checks(self) -> list[dict[str, Any]]:
        """All targets that numbers were held against, each with the question and case of its row."""
        return [{**check, "row": row} for row in self.rows for check in row["checks"]]

    @cached_property
    def stale_cases(self) -> dict[str, tuple[str, ...]]:
        """What changed since each stale case was made."""
        return {
            case: changed
            for origin in self.origins
            if (changed := origin.differing(self.today))
            for case in origin.cases
        }

    @property
    def shown_as(self) -> str:
        """The file with its rows as a person reads them: as tables where it has been rendered."""
        return f"{self.name}.md" if (RESULTS / f"{self.name}.md").exists() else f"{self.name}.json"

    @property
    def is_stale(self) -> bool:
        return bool(self.stale_cases) or not self.origins

    @property
    def is_afterwards(self) -> bool:
        """Whether some of its hashes were taken from git and not by the run."""
        return any(each.recorded == AFTERWARDS for each in self.origins)

    @property
    def dates(self) -> list[str]:
        return sorted({each.machine["date"] for each in self.origins if "date" in each.machine})

    @property
    def commits(self) -> list[str]:
        return [each.commit[:7] for each in self.origins if each.commit]


def all_results(folder: Path = RESULTS) -> list[Result]:
    """Every result file of ``folder``, by name."""
    found: list[Result] = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        benchmark = data.get("benchmark", "torch_versions")
        found.append(Result(path.stem, benchmark, data, module_hashes(benchmark)))
    return found


def without_peer() -> dict[str, str]:
    """Why a benchmark holds us against nobody else, by the benchmarks that say so (``NO_PEER``)."""
    found: dict[str, str] = {}
    for path in sorted(BENCHMARKS.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NO_PEER":
                found[path.stem] = ast.literal_eval(node.value)
    return found


def question_of(benchmark: str) -> str:
    """The first line of a benchmark's text: what it asks."""
    tree = ast.parse((BENCHMARKS / f"{benchmark}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").splitlines()[0].replace("``", "`")
