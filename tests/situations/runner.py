"""Runs situations for a benchmark, in slices that share an imported torch, and judges what they missed.

    python -m situations.runner [GROUP:NAME ...]

is the process of a slice; it prints the rows of what is named, or of what the lines of standard input name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.children import ROW, emit, run_child
from harness.record import Record, Row, at_most
from situations.oracle import build_counter
from situations.registry import GROUPS, STATED, Situation, all_situations
from situations.run import EFFORT

__all__ = ["KINDS", "Server", "counted", "listed", "misses", "named", "run_all", "why"]

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(str(ROOT / name) for name in ("tests", "benchmarks", "src", "published/src"))
AT_ONCE = 25
"""Situations that share one imported torch; each is a process of its own."""

KINDS = {
    "over budget": ("bytes over budget",),
    "wrong bits": ("equal bits",),
    "unplanned": ("no call unplanned",),
    "wrong captures": ("captures",),
    "wrong outcome": ("planned", "refused by", "eager runs", "outcome", "what else"),
}
"""What a situation may miss, by the beginnings of its checks."""


def named(only: Sequence[str]) -> list[Situation]:
    """Those that ``only`` names: a name or group as it is, else whatever contains the word; all for none."""
    known = list(all_situations().values())
    exact = {name for each in known for name in (each.name, each.group)}

    def is_named(each: Situation) -> bool:
        return any(word in (each.name, each.group) if word in exact else word in each.name for word in only)

    return [each for each in known if not only or is_named(each)]


def listed(each: Situation) -> str:
    """A line that says what ``each`` is held to."""
    expected = f"{each.refused.error}{' or planned' if each.either else ''}" if each.refused else "planned"
    return f"{each.group:12} {each.name:48} share {each.share:<5g} {expected}"


def run_all(
    record: Record,
    wanted: Sequence[Situation],
    jobs: int,
    save: Callable[[], None],
    as_row: Callable[[Row], Row] = lambda row: row,
) -> None:
    """Run all of ``wanted`` into ``record``, in slices.

    Args:
        record: takes a row of each, one of the oracle, and what failed.
        wanted: to run.
        jobs: processes at a time.
        save: called after each slice.
        as_row: what becomes of a situation's row.
    """
    slices = [wanted[k : k + AT_ONCE] for k in range(0, len(wanted), AT_ONCE)]
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as folder:
        library, reason = build_counter(Path(folder))
        record.rows.append(_oracle(library, reason))
        environment = _environment(library)

        def run(part: Sequence[Situation]) -> None:
            begin, done = time.monotonic(), set[str]()

            def on_row(row: Row) -> None:
                with lock:
                    record.rows.append(as_row(row))
                    done.add(row.columns["case"])
                    record.case_seconds[row.columns["case"]] = row.columns.get("seconds", 0.0)
                    print(_line(row), flush=True)

            arguments = ["-m", "situations.runner", *(f"{each.group}:{each.name}" for each in part)]
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


class Server:
    """One process that runs the situations that it is asked for, each in a fork.

    Args:
        effort: moves of every search for a plan.
        folder: where the counter is compiled.
    """

    def __init__(self, effort: int, folder: Path) -> None:
        library, self.reason = build_counter(folder)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "situations.runner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_environment(library), EFFORT: str(effort)},
        )

    def row(self, group: str, name: str) -> Row:
        """What the situation ``name`` is judged to be."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(f"{group}:{name}", file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith(ROW):
                return Row.from_json(json.loads(line.removeprefix(ROW)))
        raise RuntimeError(f"the process of the situations ended with {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def _environment(library: Path | None) -> dict[str, str]:
    return {
        "PYTHONPATH": PATHS,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "LD_PRELOAD": str(library) if library is not None else os.environ.get("LD_PRELOAD", ""),
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "MALLOC_ARENA_MAX": "1",
    }


def _oracle(library: Path | None, reason: str) -> Row:
    """How exact the counter is, or why there is none."""
    if library is None:
        return Row("oracle", {"case": "counter", "counter": f"skipped: {reason}"})
    found: list[str] = []
    code = "from situations.oracle import measured_resolution; from harness.children import emit;"
    code += "from harness.record import Row; emit([Row('oracle', {'resolution': measured_resolution()})])"
    environment = {"LD_PRELOAD": str(library), "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    error = run_child(["-c", code], lambda row: found.append(row.columns["resolution"]), environment, 120.0)
    if error is not None:
        return Row("oracle", {"case": "counter", "counter": f"failed: {error}"}, (at_most("failures", 1, 0),))
    columns = {"case": "counter", "counter": "counts the blocks of libc10", "resolution in bytes": int(found[0])}
    return Row("oracle", columns, (at_most("resolution in bytes", int(found[0]), 64),))


def counted(rows: Iterable[Row]) -> list[Row]:
    """How many situations miss what, by group and in all."""
    rows, found = list(rows), list[Row]()
    for group in [*GROUPS, "all"]:
        mine = [row for row in rows if group in ("all", row.question)]
        if mine:
            missed = {kind: misses(mine, kind) for kind in KINDS}
            limits = sum(str(row.columns.get("why", "")).startswith(STATED) for row in mine if row.passed)
            right = {"right": sum(row.passed for row in mine), "of these by a stated limit": limits}
            columns = {"case": group, "situations": len(mine), **right, **missed}
            checks = tuple(at_most(kind, count, 0) for kind, count in missed.items()) if group == "all" else ()
            found.append(Row("counts", columns, checks))
    return found


def misses(rows: Iterable[Row], kind: str) -> int:
    """How many of ``rows`` miss what ``kind`` of :data:`KINDS` says."""
    return sum(any(not check.passed and check.what.startswith(KINDS[kind]) for check in row.checks) for row in rows)


def why(row: Row, most: int = 300) -> str:
    """Why ``row`` is not right, in one line."""
    return re.sub(r"\s+", " ", str(row.columns.get("why", "")))[:most]


def _line(row: Row) -> str:
    verdict = "ok  " if row.passed else "MISS"
    where = f" [{row.columns['where'][:200]}]" if row.columns.get("where") else ""
    return f"{verdict} {row.question}:{row.columns['case']} {row.columns.get('seconds', 0)} s {why(row)}{where}"


if __name__ == "__main__":
    from situations.child import rows

    emit(rows(sys.argv[1:] or sys.stdin))
