"""A benchmark of several questions: every case in a process of its own, results written after each.

A question is a module with ``TITLE``, ``CASES``, ``QUICK`` (the cases of a smoke test) and ``rows(case, quick)``. One
with ``summary(rows)`` has rows over all its cases too, made anew whenever results are written. One with ``lacking()``
is left out, and that is said, where it tells what is not installed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from harness.children import emit, run_child
from harness.origin import cases_of_this_version
from harness.record import Record, Row, table

__all__ = ["main"]

BENCHMARKS = Path(__file__).resolve().parents[1]


def main(script: str, description: str, questions: Mapping[str, ModuleType], most_seconds: float) -> int:
    """The command line of a benchmark; the exit code says whether every target was met.

    Args:
        script: the benchmark's own file.
        description: for ``--help``.
        questions: by name.
        most_seconds: for one case; a child that takes longer is ended and reported.
    """
    name = Path(script).stem
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test; fewer cases")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="questions or parts of question:case")
    parser.add_argument("--out", type=Path, default=None, help=f"result file (default: benchmarks/results/{name}.json)")
    parser.add_argument(
        "--merge", nargs="+", type=Path, default=[], metavar="FILE", help="run nothing: join runs; later ones replace"
    )
    parser.add_argument("--resume", action="store_true", help="keep what the result file has; run the other cases")
    parser.add_argument("--release", action="store_true", help="run what was not made with this version; keep the rest")
    parser.add_argument("--child", nargs=2, metavar=("QUESTION", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        question, case = options.child
        emit(questions[question].rows(case, options.quick))
        return 0
    out = options.out or BENCHMARKS / "results" / (f"{name}-quick.json" if options.quick else f"{name}.json")
    record = Record(
        name,
        {key: module.TITLE for key, module in questions.items()},
        {"quick": options.quick, "only": options.only or "all"},
    )
    if (options.resume or options.release) and out.exists():
        record.take(Record.read(out, record.titles))
    kept = cases_of_this_version(out) if options.release else set(record.case_seconds)
    if options.merge:
        for path in options.merge:
            record.take(Record.read(path, record.titles))
        known = {f"{question}:{case}" for question, module in questions.items() for case in module.CASES}
        record.failures = [each for each in record.failures if each["case"] in known]  # not of cases that are gone
        _summarise(record, questions)
        record.write(out)
    else:
        _run(record, script, questions, out, most_seconds, kept)
    print(f"\n{record.markdown()}")
    return 0 if record.passed else 1


def _run(
    record: Record, script: str, questions: Mapping[str, ModuleType], out: Path, most_seconds: float, kept: set[str]
) -> None:
    """All wanted cases but those that are ``kept``, one after the other; the record is written after each."""
    quick = bool(record.settings["quick"])
    with tempfile.TemporaryDirectory() as caches:
        # Costs are measured in this run, not taken from an earlier one; numba's compiled planners are shared.
        paths = [BENCHMARKS, BENCHMARKS.parent / "src", BENCHMARKS.parent / "tests"]
        environment = {"XDG_CACHE_HOME": caches, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        for question, case in _wanted(questions, quick, record.settings["only"]):
            if f"{question}:{case}" in kept:
                continue
            fresh = Record(record.name, record.titles, record.settings, record.machine)
            begin = time.monotonic()
            arguments = [script, "--child", question, case, *(["--quick"] if quick else [])]
            error = run_child(arguments, lambda row, fresh=fresh: _keep(fresh, row), environment, most_seconds)
            seconds = fresh.case_seconds[f"{question}:{case}"] = round(time.monotonic() - begin, 1)
            if error is not None:
                fresh.failures.append({"case": f"{question}:{case}", "error": error})
                print(f"{question}:{case} FAILED: {error}", flush=True)
            record.take(fresh)
            print(f"-- {question}:{case}: {seconds} s", flush=True)
            _summarise(record, questions)
            record.write(out)


def _summarise(record: Record, questions: Mapping[str, ModuleType]) -> None:
    """The rows over all cases of a question, in the place of those of before."""
    for name, module in questions.items():
        if hasattr(module, "summary"):
            own = [row for row in record.rows if row.question == name and row.columns["case"] in module.CASES]
            others = [row for row in record.rows if row.question != name]
            record.rows = [*others, *own, *module.summary(own)]


def _wanted(questions: Mapping[str, ModuleType], quick: bool, only: list[str] | str) -> list[tuple[str, str]]:
    """Question and case of everything to run."""
    pairs: list[tuple[str, str]] = []
    for name, module in questions.items():
        if lacking := module.lacking() if hasattr(module, "lacking") else "":
            print(f"{name} is left out: {lacking}", flush=True)
        else:
            pairs += [(name, case) for case in (module.QUICK if quick else module.CASES)]
    return [pair for pair in pairs if only == "all" or any(word in ":".join(pair) for word in only)]


def _keep(record: Record, row: Row) -> None:
    """Add a row and show it."""
    record.rows.append(row)
    print(table([row]).splitlines()[-1], flush=True)
