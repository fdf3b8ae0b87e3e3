"""Is the house in order? Imports, sizes, the door, seconds of tests, captures; executor and planner against older code.

    python benchmarks/structure.py [--only imports door captures executor planner ...] [--old COMMIT]
                                   [--measure quick test | --quick-seconds S --test-seconds S]

``executor`` and ``planner`` check COMMIT out beside the working tree (``git worktree``) and let both run in turns, on
the models of ``path.py``. Seconds of ``make quick`` and ``make test`` are measured on demand or taken from what
somebody has measured. A question that is run again replaces its own rows in ``benchmarks/results/structure.json``; the
others' stay.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness.children import emit, run_child
from harness.origin import cases_of_this_version
from harness.record import Record, Row, at_most, table
from questions import version_pairs

SEEDS = {"weights and inputs": 0, "order of turns": 0}
NO_PEER = "It is about this code: its imports, its tests, and its executor and planner against earlier ones of ours."

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
OUT = BENCHMARKS / "results" / "structure.json"
VERSIONS = ("executor", "planner")
QUESTIONS = ("imports", "house", "door", "tests", "captures", *VERSIONS)
MOST_QUICK_SECONDS, MOST_TEST_SECONDS = 60.0, 720.0
OLD = "8ec35e6"
"""The last commit before the engine was put in order, when the package had another name."""


def main() -> int:
    options = _options()
    if options.child:
        emit(importlib.import_module(f"questions.{options.child}").rows())
        return 0
    titles = {"tests": "Seconds of the tests", **{name: _title(name) for name in QUESTIONS if name != "tests"}}
    record = Record("structure", titles, {"old": options.old})
    current = cases_of_this_version(options.out) if options.release else set[str]()
    for question in [each for each in options.only or QUESTIONS if each not in current]:
        begin = time.monotonic()
        try:
            for row in _rows(question, options):
                record.rows.append(row)
                print(table([row]).splitlines()[-1], flush=True)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            record.failures.append({"case": question, "error": str(error)})
            print(f"{question} FAILED: {error}", flush=True)
        record.case_seconds[question] = round(time.monotonic() - begin, 1)
    if options.out.exists():
        known = Record.read(options.out, titles)
        if not options.cases:  # also rows of models that are asked for no more, which are of another old version
            again = {row.question for row in record.rows} & set(VERSIONS)
            known.rows = [row for row in known.rows if row.question not in again]
        known.take(record)
        known.machine = record.machine
        record = known
    record.write(options.out)
    print(f"\n{record.markdown()}")
    return 0 if record.passed else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, help="questions (default: all)")
    parser.add_argument("--release", action="store_true", help="leave out what was made with this version")
    parser.add_argument("--old", default=OLD, metavar="COMMIT", help=f"to compare with (default: {OLD})")
    parser.add_argument("--cases", nargs="+", default=None, metavar="NAME", help="models of executor and planner")
    parser.add_argument("--turns", type=int, default=None, help="of each child in these questions")
    parser.add_argument("--measure", nargs="+", choices=("quick", "test"), default=[], help="run these make targets")
    parser.add_argument("--quick-seconds", type=float, help="what make quick took")
    parser.add_argument("--test-seconds", type=float, help="what make test took")
    parser.add_argument("--out", type=Path, default=OUT, help="result file (default: results/structure.json)")
    parser.add_argument("--child", choices=("captures", "house"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _title(question: str) -> str:
    if question in VERSIONS:
        return version_pairs.TITLES[question]
    return str(importlib.import_module(f"questions.{question}").TITLE)


def _rows(question: str, options: argparse.Namespace) -> Iterator[Row]:
    if question == "tests":
        yield from _tests(options)
    elif question in VERSIONS:
        with _checked_out(options.old) as old:
            cases = tuple(options.cases or version_pairs.CASES)
            yield from version_pairs.compare(question, old / "src", ROOT / "src", cases, options.turns)
    elif question in ("captures", "house"):  # counted in a process of its own
        rows: list[Row] = []
        with tempfile.TemporaryDirectory() as caches:
            environment = {"XDG_CACHE_HOME": caches, "PYTHONPATH": f"{BENCHMARKS}:{ROOT / 'src'}"}
            error = run_child([__file__, "--child", question], rows.append, environment, 600.0)
        if error is not None:
            raise RuntimeError(error)
        yield from rows
    else:
        yield from importlib.import_module(f"questions.{question}").rows()


def _tests(options: argparse.Namespace) -> Iterator[Row]:
    """Seconds of make targets: measured if asked for, else as given, else nothing is said."""
    for target, given, most in (
        ("quick", options.quick_seconds, MOST_QUICK_SECONDS),
        ("test", options.test_seconds, MOST_TEST_SECONDS),
    ):
        seconds = given
        if target in options.measure:
            begin = time.monotonic()
            subprocess.run(["make", target], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            seconds = time.monotonic() - begin
        if seconds is not None:
            how = "measured" if target in options.measure else "given"
            columns = {"case": f"make {target}", "seconds": float(seconds), "how": how}
            yield Row("tests", columns, (at_most("seconds", float(seconds), most),))


@contextlib.contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    """A work tree of ``commit``, gone at the end."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "old"
        subprocess.run(
            ["git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True
        )
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=True)


if __name__ == "__main__":
    sys.exit(main())
