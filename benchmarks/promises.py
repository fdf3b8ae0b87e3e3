"""Do the promises hold in real training code? Situations, each run by eager and under a budget, all steps.

    python benchmarks/promises.py [--list] [--only NAME ...] [--moving DIRECTORY] [--jobs N] [--out FILE]

A situation (``situations/``) is held against an oracle that is not ours: bytes as a preloaded counter of the
allocator's calls sees them, bits as eager gives them, planned calls and captures as expected. NAME is a group or a part
of a situation's name. Results of a run of some situations replace their rows; the others' stay.

With ``--moving`` every model is fitted with that directory's disk as a tier, on which any tensor pays, so that the same
situations hold what moves; results go to ``promises-moving.json``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.children import emit, run_child
from harness.record import Record, Row, at_most
from situations.oracle import SLACK_BYTES, build_counter
from situations.registry import GROUPS, STATED, Situation, all_situations
from situations.run import MOVING

BENCHMARKS = Path(__file__).resolve().parent
OUT = BENCHMARKS / "results" / "promises.json"
AT_ONCE = 25
"""Situations that share one imported torch; each is a process of its own."""

_KINDS = {
    "over budget": ("bytes over budget",),
    "wrong bits": ("equal bits",),
    "unplanned": ("no call unplanned",),
    "wrong captures": ("captures",),
    "wrong outcome": ("planned", "refused by", "eager runs", "outcome", "what else"),
}


def main() -> int:
    options = _options()
    if options.child:
        from situations.child import rows

        emit(rows(options.child))
        return 0
    wanted = _wanted(options.only)
    if options.list:
        for each in wanted:
            expected = f"{each.refused.error}{' or planned' if each.either else ''}" if each.refused else "planned"
            print(f"{each.group:12} {each.name:48} share {each.share:<5g} {expected}")
        print(f"{len(wanted)} situations")
        return 0
    record = Record("promises", {"counts": "Counts", "oracle": "The oracle", **GROUPS}, {"slack_bytes": SLACK_BYTES})
    before = Record.read(options.out, record.titles) if options.out.exists() and options.only else None
    _run(record, wanted, options.jobs, lambda: _joined(before, record).write(options.out))
    record = _joined(before, record)
    record.write(options.out)
    print(f"\n{record.markdown()}")
    return 0 if record.passed else 1


def _joined(before: Record | None, record: Record) -> Record:
    """``record`` with what an earlier run knows of other situations, and the counts."""
    joined = Record(record.name, record.titles, record.settings, record.machine)
    if before is not None:
        joined.take(before)
    joined.take(record)
    names = {*all_situations(), "counter"}
    joined.rows = [row for row in joined.rows if row.question != "counts" and row.columns["case"] in names]
    joined.failures = [each for each in joined.failures if each["case"] in names]
    joined.rows += _counts([row for row in joined.rows if row.question in GROUPS])
    return joined


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="groups or parts of situations' names")
    parser.add_argument("--list", action="store_true", help="print the situations and run nothing")
    parser.add_argument("--moving", type=Path, default=None, metavar="DIRECTORY", help="let tensors move there")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time (default: 1)")
    parser.add_argument("--out", type=Path, default=None, help="result file (default: results/promises.json)")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    moving = options.moving is not None
    if moving:
        os.environ[MOVING] = str(options.moving.absolute())
    options.out = options.out or (OUT.with_name("promises-moving.json") if moving else OUT)
    return options


def _wanted(only: list[str]) -> list[Situation]:
    """Those that ``only`` names: a name or group as it is, else whatever contains the word."""
    known = list(all_situations().values())
    exact = {name for each in known for name in (each.name, each.group)}

    def named(each: Situation) -> bool:
        return any(word in (each.name, each.group) if word in exact else word in each.name for word in only)

    return [each for each in known if not only or named(each)]


def _run(record: Record, wanted: list[Situation], jobs: int, save: Callable[[], None]) -> None:
    """All of ``wanted``, in slices; ``save`` after each."""
    slices = [wanted[k : k + AT_ONCE] for k in range(0, len(wanted), AT_ONCE)]
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as folder:
        library, reason = build_counter(Path(folder))
        record.rows.append(_oracle(library, reason))
        environment = {
            "PYTHONPATH": os.pathsep.join(
                map(str, (BENCHMARKS, BENCHMARKS.parent / "src", BENCHMARKS.parent / "tests"))
            ),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "LD_PRELOAD": str(library) if library is not None else os.environ.get("LD_PRELOAD", ""),
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "0",
            "MALLOC_ARENA_MAX": "1",
        }

        def run(part: list[Situation]) -> None:
            begin, done = time.monotonic(), set[str]()

            def on_row(row: Row) -> None:
                with lock:
                    record.rows.append(row)
                    done.add(row.columns["case"])
                    record.case_seconds[row.columns["case"]] = row.columns.get("seconds", 0.0)
                    print(_line(row), flush=True)

            arguments = [__file__, "--child", *(f"{each.group}:{each.name}" for each in part)]
            error = run_child(arguments, on_row, environment, sum(each.seconds for each in part) + 60.0)
            with lock:
                if error is not None:
                    for each in part:
                        if each.name not in done:
                            record.failures.append({"case": each.name, "error": error})
                            record.case_seconds[each.name] = round(time.monotonic() - begin, 1)
                            print(f"{each.name} FAILED: {error}", flush=True)
                save()

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(run, slices))


def _oracle(library: Path | None, reason: str) -> Row:
    """How exact the counter is, or why there is none."""
    if library is None:
        return Row("oracle", {"case": "counter", "counter": f"skipped: {reason}"})
    found: list[str] = []
    code = "from situations.oracle import measured_resolution; from harness.children import emit;"
    code += "from harness.record import Row; emit([Row('oracle', {'resolution': measured_resolution()})])"
    environment = {"LD_PRELOAD": str(library), "PYTHONPATH": str(BENCHMARKS), "OMP_NUM_THREADS": "1"}
    error = run_child(["-c", code], lambda row: found.append(row.columns["resolution"]), environment, 120.0)
    if error is not None:
        return Row("oracle", {"case": "counter", "counter": f"failed: {error}"}, (at_most("failures", 1, 0),))
    columns = {"case": "counter", "counter": "counts the blocks of libc10", "resolution in bytes": int(found[0])}
    return Row("oracle", columns, (at_most("resolution in bytes", int(found[0]), 64),))


def _counts(rows: list[Row]) -> list[Row]:
    """How many situations miss what, by group and in all."""
    found: list[Row] = []
    for group in [*GROUPS, "all"]:
        mine = [row for row in rows if group in ("all", row.question)]
        if mine:
            missed = {kind: sum(_misses(row, words) for row in mine) for kind, words in _KINDS.items()}
            limits = sum(str(row.columns.get("why", "")).startswith(STATED) for row in mine if row.passed)
            right = {"right": sum(row.passed for row in mine), "of these by a stated limit": limits}
            columns = {"case": group, "situations": len(mine), **right, **missed}
            checks = tuple(at_most(kind, count, 0) for kind, count in missed.items()) if group == "all" else ()
            found.append(Row("counts", columns, checks))
    return found


def _misses(row: Row, words: tuple[str, ...]) -> bool:
    return any(not check.passed and check.what.startswith(words) for check in row.checks)


def _line(row: Row) -> str:
    verdict = "ok  " if row.passed else "MISS"
    why = re.sub(r"\s+", " ", str(row.columns.get("why", "")))[:300]
    where = f" [{row.columns['where'][:200]}]" if row.columns.get("where") else ""
    return f"{verdict} {row.question}:{row.columns['case']} {row.columns.get('seconds', 0)} s {why}{where}"


if __name__ == "__main__":
    sys.exit(main())
