"""Run every benchmark: a selection of real cases in under an hour, or all that has no figures of today's sources.

    python -m harness.bench             the selection below, into results/bench; goes on where it was cut off
    python -m harness.bench --full      every case that is stale or missing, into results; likewise
    python -m harness.bench --list      what either runs

The selection has at least one case of every question that needs no card and no other torch, at its full size. At the
end stand, for each benchmark, the targets met, and how its bytes and counts compare with the committed result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.origin import BENCHMARKS, current_cases

RESULTS = BENCHMARKS / "results"
BENCH = RESULTS / "bench"


@dataclass(frozen=True)
class Selection:
    """Cases of one benchmark.

    Attributes:
        name: of the benchmark.
        only: what its ``--only`` takes.
        minutes: on two quiet cores, by the clock.
        resumes: whether it goes on by itself where it was cut off; else it is run as a whole.
    """

    name: str
    only: tuple[str, ...]
    minutes: float
    resumes: bool = True


SELECTION = (
    Selection("structure", ("imports", "captures"), 0.5, resumes=False),
    Selection("path", ("bits:mlp_chain", "frontier:chain-64", "bound", "hard_limit"), 9.0),
    Selection("peers", ("chain-64",), 4.0),
    Selection("models", ("known:", "zoo:gpt 1", "zoo:vgg16 1", "keep_all:hf_llama", "random:70-79"), 6.5),
    Selection("promises", ("outputs", "draws", "large"), 3.0, resumes=False),
    Selection("trainers", ("plain",), 2.0, resumes=False),
    Selection("public_suite", ("GPT2LMHeadModel", "ViTForImageClassification", "WhisperFor"), 2.5),
    Selection("opinfo", ("nn.functional.silu", "take", "abs", "linalg.tensorsolve"), 1.0, resumes=False),
    Selection("planners", ("oracle:0-49", "oracle:50-99", "unit_chain"), 3.0),
    Selection("planning", ("revolve:64 ", "revolve:100 ", "small:0-9", "gap:gpt-4L", "gap:vgg16", "warm:gpt"), 4.0),
    Selection("checkmate", ("max_batch:unet", "max_batch:vgg19", "max_batch:fcn8"), 1.5),
    Selection("echo", ("decisions:two", "decisions:broadcast", "sockeye:groundhog", "networks:transformer"), 2.5),
    Selection("swap_tf", ("m3:4 layers", "real:dcgan"), 2.5),
    Selection("libra", ("steps:llama_small", "batch:gpt2_small", "real:llama_small"), 3.0),
    Selection("published", ("vgg16", "unet"), 3.5),
    Selection("floors", ("sizes:float32, 1 threads",), 4.0),
    Selection("hybrid_bound", ("lane_gap:0-49", "lane_violations:165-179"), 2.0),
    Selection("hybrid", ("plan:gpt-12L a100", "grid:vgg16 a100", "disk:mlp_chain"), 1.5),
    Selection("soak", ("soak:steps of changing shapes",), 1.5),
)
"""Every benchmark but ``gpu`` (`make gpu`) and ``torch_versions`` (`make test-torch`)."""
NAMES = ("case", "method", "planner", "budget", "f", "share", "threads", "call")
"""Columns that say which row it is."""


def main() -> int:
    options = _options()
    if options.list:
        for each in SELECTION:
            print(f"{each.name:14} {'everything' if options.full else ', '.join(each.only)}")
        return 0
    failed: list[str] = []
    begin = time.monotonic()
    for each in SELECTION:
        command = _full(each.name, options.graphs) if options.full else _selected(each)
        if command is None:
            print(f"-- {each.name}: has figures of today's sources", flush=True)
            continue
        print(f"-- {each.name}, after {(time.monotonic() - begin) / 60:.1f} minutes", flush=True)
        if subprocess.run([sys.executable, *command], cwd=BENCHMARKS.parent, check=False).returncode:
            failed.append(each.name)
    if not options.full:
        print(f"\n{(time.monotonic() - begin) / 60:.1f} minutes\n\n" + "\n".join(map(_compared, SELECTION)))
    if failed:
        print(f"\nmissed a target or failed: {', '.join(failed)}")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all that is stale or missing; a day and more")
    parser.add_argument("--list", action="store_true", help="print what would run and run nothing")
    parser.add_argument("--graphs", type=Path, help="folder of the published graphs, for planning and checkmate")
    return parser.parse_args()


def _selected(selection: Selection) -> list[str] | None:
    """The command of a selection, or nothing where it has run with today's sources."""
    out = BENCH / f"{selection.name}.json"
    if not selection.resumes and current_cases(selection.name, out):
        return None
    going_on = ["--stale"] if selection.resumes else []
    return [str(BENCHMARKS / f"{selection.name}.py"), "--only", *selection.only, "--out", str(out), *going_on]


def _full(name: str, graphs: Path | None) -> list[str]:
    """The command that runs what has no figures of today's sources."""
    with_graphs = ["--graphs", str(graphs)] if graphs is not None and name in ("planning", "checkmate") else []
    return [str(BENCHMARKS / f"{name}.py"), "--stale", *with_graphs]


def _compared(selection: Selection) -> str:
    """Targets met, and how many bytes and counts are those of the committed result."""
    path = BENCH / f"{selection.name}.json"
    if not path.exists():
        return f"{selection.name:14} gave no result"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    checks = [check for row in rows for check in row["checks"]]
    committed = json.loads((RESULTS / path.name).read_text(encoding="utf-8"))["rows"] if _committed(path.name) else []
    same, differ = counted(rows, committed)
    met = sum(check["passed"] for check in checks)
    return (
        f"{selection.name:14} {met} of {len(checks)} targets met; bytes and counts: {same} as committed, {differ} other"
    )


def _committed(name: str) -> bool:
    return (RESULTS / name).exists()


def counted(ours: Iterable[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Of rows that both have, how many whole numbers and verdicts are the same, and how many are not.

    Seconds and what follows from them differ from machine to machine and are not counted.
    """
    known = {key: row["columns"] for row in theirs if (key := _key(row)) is not None}
    same = differ = 0
    for row in ours:
        columns = known.get(_key(row) or "", {})
        for name, value in row["columns"].items():
            if isinstance(value, int) and name in columns:
                same, differ = (same + 1, differ) if columns[name] == value else (same, differ + 1)
    return same, differ


def _key(row: dict[str, Any]) -> str | None:
    columns = row["columns"]
    names = [
        name for name in ("case", "method", "planner", "budget", "f", "share", "threads", "call") if name in columns
    ]
    return json.dumps([row["question"], *(columns[name] for name in names)]) if names else None


if __name__ == "__main__":
    sys.exit(main())
