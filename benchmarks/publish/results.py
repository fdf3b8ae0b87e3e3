"""Result files as data, each with the latest sample of it that ``make bench`` ran since it was made."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from harness import checked
from harness.checked import Checked
from harness.origin import BENCHMARKS, Origin

__all__ = ["RESULTS", "Result", "all_results", "question_of", "without_peer"]

RESULTS = BENCHMARKS / "results"


@dataclass(frozen=True)
class Result:
    """One result file.

    Attributes:
        name: of the file.
        benchmark: whose it is.
        data: as written.
        sample: the latest that was held against it (``harness.checked``).
    """

    name: str
    benchmark: str
    data: dict[str, Any]
    sample: Checked | None = None

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

    @property
    def is_stale(self) -> bool:
        """Whether its latest sample contradicts it."""
        return self.sample is not None and bool(self.sample.contradicted)

    @property
    def versions(self) -> list[str]:
        return sorted({each.version for each in self.origins})

    @property
    def dates(self) -> list[str]:
        return sorted({each.machine["date"] for each in self.origins if "date" in each.machine})

    @property
    def commits(self) -> list[str]:
        return [each.commit[:7] for each in self.origins if each.commit]


def all_results(folder: Path = RESULTS) -> list[Result]:
    """Every result file of ``folder``, by name."""
    samples = {each.name: each for each in checked.read()}
    found: list[Result] = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        result = Result(path.stem, data.get("benchmark", "torch_versions"), data)
        sample = samples.get(path.stem)
        since = sample is not None and sample.origin.machine["date"] >= max(result.dates, default="")
        found.append(replace(result, sample=sample) if since else result)
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
