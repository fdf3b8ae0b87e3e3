"""Does every op with gradients that torch tests have eager's bits when it is captured?

    python benchmarks/opinfo.py [--only NAME ...] [--again] [--out FILE]

Goes on where it was cut off: ops that have a row are left out, unless ``--again`` or ``--only`` asks for them. Ops run
in batches, each batch in a process of its own; one that kills its process is written down, and the rest goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from harness.children import emit, run_child
from harness.origin import cases_of_this_version
from harness.record import Record, Row, holds, table
from questions import opinfo

SEEDS = {"samples": 0}
NO_PEER = "Eager is the reference of every bit; no peer claims it."

BENCHMARKS = Path(__file__).resolve().parent
OUT = BENCHMARKS / "results" / "opinfo.json"
TITLES = {"summary": opinfo.SUMMARY, "opinfo": opinfo.TITLE}
BATCH = 60
MOST_SECONDS = 1500.0


def main() -> int:
    options = _options()
    if options.child:
        emit(opinfo.rows(options.child))
        return 0
    record = Record("opinfo", TITLES, {"samples": opinfo.SAMPLES})
    of_this = not options.release or cases_of_this_version(options.out)  # rows are of one run
    if options.out.exists() and of_this and not options.again:
        record.take(Record.read(options.out, TITLES))
    _drop(record, options.only)
    done = {row.columns["case"] for row in record.rows}
    wanted = [name for name in opinfo.names() if name not in done and (not options.only or name in options.only)]
    with tempfile.TemporaryDirectory() as caches:
        environment = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", caches), "PYTHONPATH": _path()}
        while wanted:
            wanted = _batch(record, wanted, environment, options.out)
    _write(record, options.out)
    print(table([row for row in record.rows if row.question == "summary"]))
    return 0 if record.passed else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="ops (default: all that have no row yet)")
    parser.add_argument("--again", action="store_true", help="leave no row standing")
    parser.add_argument("--release", action="store_true", help="as --again where the rows are of another version")
    parser.add_argument("--out", type=Path, default=OUT, help="result file (default: results/opinfo.json)")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def _path() -> str:
    return os.pathsep.join(map(str, (BENCHMARKS, BENCHMARKS.parent / "src")))


def _drop(record: Record, again: list[str]) -> None:
    gone = {*again, "all"}
    record.rows = [row for row in record.rows if row.columns["case"] not in gone]


def _batch(record: Record, wanted: list[str], environment: dict[str, str], out: Path) -> list[str]:
    """Run the first of ``wanted``, keep each row as it comes; what is left of them."""
    names, rest = wanted[:BATCH], wanted[BATCH:]
    left = list(names)

    def keep(row: Row) -> None:
        left.remove(str(row.columns["case"]))
        record.rows.append(row)
        _write(record, out)
        if row.columns["outcome"] not in ("equal", "no gradient"):
            print(table([row]).splitlines()[-1], flush=True)

    begin = time.monotonic()
    error = run_child([__file__, "--child", *names], keep, environment, MOST_SECONDS)
    if error is not None and left:
        columns = {"case": left[0], "samples": 0, "equal": 0, "outcome": "crash", "found": error, "reason": ""}
        keep(Row("opinfo", columns, (holds("same bits, or named", False),)))
    record.case_seconds[names[0]] = round(time.monotonic() - begin, 1)
    _write(record, out)
    print(f"-- {len(left) + len(rest)} to go, {record.case_seconds[names[0]]} s", flush=True)
    return left + rest


def _write(record: Record, out: Path) -> None:
    found = [row for row in record.rows if row.question == "opinfo"]
    record.rows = [opinfo.summary(found), *sorted(found, key=lambda row: str(row.columns["case"]))]
    record.write(out)


if __name__ == "__main__":
    sys.exit(main())
