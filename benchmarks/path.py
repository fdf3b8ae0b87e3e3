"""Does the whole path keep its promises? Bits, bytes, time and planning of recompute plans, each with its target.

    python benchmarks/path.py [--quick] [--only NAME ...] [--out benchmarks/results/path.json]

NAME is a question (bits, frontier, executor, bound, planning, hard_limit) or part of ``question:case``. Every case
runs in a process of its own; results are written after each, with a rendering in Markdown beside them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

from harness.children import emit, run_child
from harness.record import Record, Row, table
from questions import bits, bound, executor, frontier, hard_limit, planning

HERE = Path(__file__).resolve().parent
QUESTIONS: dict[str, ModuleType] = {
    "bits": bits,
    "frontier": frontier,
    "executor": executor,
    "bound": bound,
    "planning": planning,
    "hard_limit": hard_limit,
}
MOST_SECONDS = 900.0
"""For one case; a child that takes longer is ended and reported."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test of under two minutes; fewer cases")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="questions or parts of question:case")
    parser.add_argument("--out", type=Path, default=None, help="result file (default: benchmarks/results/path.json)")
    parser.add_argument("--child", nargs=2, metavar=("QUESTION", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        question, case = options.child
        emit(QUESTIONS[question].rows(case, options.quick))
        return 0
    out = options.out or HERE / "results" / ("path-quick.json" if options.quick else "path.json")
    record = run(options.quick, options.only, out)
    print(f"\n{record.markdown()}")
    return 0 if record.passed else 1


def run(quick: bool, only: list[str], out: Path) -> Record:
    """All wanted cases, one after the other; the record is written after each."""
    record = Record(
        "path", {name: module.TITLE for name, module in QUESTIONS.items()}, {"quick": quick, "only": only or "all"}
    )
    with tempfile.TemporaryDirectory() as caches:
        # Costs are measured in this run, not taken from an earlier one; numba's compiled planners are shared.
        environment = {"XDG_CACHE_HOME": caches, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "src")])}
        for question, case in wanted(quick, only):
            begin = time.monotonic()
            arguments = [__file__, "--child", question, case, *(["--quick"] if quick else [])]
            error = run_child(arguments, lambda row: keep(record, row), environment, MOST_SECONDS)
            seconds = record.case_seconds[f"{question}:{case}"] = round(time.monotonic() - begin, 1)
            if error is not None:
                record.failures.append({"case": f"{question}:{case}", "error": error})
                print(f"{question}:{case} FAILED: {error}", flush=True)
            print(f"-- {question}:{case}: {seconds} s", flush=True)
            record.write(out)
    return record


def wanted(quick: bool, only: list[str]) -> list[tuple[str, str]]:
    """Question and case of everything to run."""
    pairs = [(name, case) for name, module in QUESTIONS.items() for case in (module.QUICK if quick else module.CASES)]
    return [pair for pair in pairs if not only or any(word in ":".join(pair) for word in only)]


def keep(record: Record, row: Row) -> None:
    """Add a row and show it."""
    record.rows.append(row)
    print(table([row]).splitlines()[-1], flush=True)


if __name__ == "__main__":
    sys.exit(main())
