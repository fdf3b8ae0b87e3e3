"""What does a budget cost on a card? PyTorch's means against Ebbtide at their peaks and at its smallest.

    python benchmarks/gpu.py [--only NAME ...] [--methods WORD ...] [--redo] [--minutes 30] [--toy] [--out FOLDER]

A step is a model at a precision (gpt-float32, llama-lora-bfloat16, ...), in a process of its own, under ten minutes,
and writes its own file under ``benchmarks/results/gpu``. A step whose file is of the same code, versions and card is
skipped, so that a run that was cut off goes on; no step begins that would not end within ``--minutes``. ``make gpu``
asks for steps one by one (``tests/gpu/agenda.py``). Without a card this says so and ends with 2; ``--toy`` runs the
same code at toy size on CPU. ``--methods host`` runs the rows whose method has that word, eager, and what they are
compared at, and writes ``NAME-part``: for a card that is lent for minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.children import emit, run_child
from harness.record import Record, Row, table

SEEDS = {"weights and inputs": 0, "step": 7, "planners": 0}

BENCHMARKS = Path(__file__).resolve().parent
SOURCES = (BENCHMARKS.parent / "src" / "ebbtide", BENCHMARKS / "cards")
MOST_SECONDS = 590.0
"""For one step; a child that takes longer is ended, and what it had measured is kept."""
NO_CARD = "no CUDA device: torch.cuda.is_available() is false here; `make gpu` needs a card (--toy runs on CPU)"
_SAME = ("python", "torch", "card", "code")
"""What a result is of; another value, and the step is run again."""

Run = Callable[[Sequence[str], Callable[[Row], None], float], str | None]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    import torch

    if not options.toy and not torch.cuda.is_available():
        print(NO_CARD, file=sys.stderr)
        return 2
    from cards.device import the_device
    from cards.steps import CASES, rows_on

    device = the_device(options.toy)
    if options.child:
        emit(rows_on(device, options.child, toy=options.toy, words=options.methods))
        return 0
    facts = device.description() | {"code": code()}
    wanted = [case for case in CASES if not options.only or any(word in case for word in options.only)]
    del device
    records = run_steps(
        wanted,
        facts,
        options.out,
        redo=options.redo,
        seconds=60 * options.minutes,
        run=_child(options),
        methods=options.methods,
    )
    summary = _summary([*records, *_others(wanted, facts, options.out)], facts)
    (options.out / "summary.md").write_text(summary.markdown(), encoding="utf-8")
    print(f"\n{summary.markdown()}")
    return 0 if summary.passed and len(records) == len(wanted) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="steps, or parts of their names")
    parser.add_argument("--methods", nargs="+", default=[], metavar="WORD", help="rows whose method has one of these")
    parser.add_argument("--redo", action="store_true", help="also steps that have a result of the same versions")
    parser.add_argument("--minutes", type=float, default=30.0, help="for all steps together (default: 30)")
    parser.add_argument("--toy", action="store_true", help="the same code at toy size on CPU")
    parser.add_argument("--out", type=Path, default=None, help="folder (default: benchmarks/results/gpu)")
    parser.add_argument("--child", metavar="STEP", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out or BENCHMARKS / "results" / ("gpu-toy" if options.toy else "gpu")
    return options


def code(folders: Sequence[Path] = SOURCES) -> str:
    """A fingerprint of the code that is measured and of the code that measures."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def run_steps(
    wanted: Sequence[str],
    facts: dict[str, Any],
    out: Path,
    *,
    redo: bool,
    seconds: float,
    run: Run,
    methods: Sequence[str] = (),
) -> list[Record]:
    """Every wanted step's record, from its file where that is of the same ``facts``; written as rows come.

    A step begins only if the longest so far would still end in time; what is left over is said, and comes next time.
    """
    records: list[Record] = []
    begin, longest = time.monotonic(), 0.0
    for position, case in enumerate(wanted):
        path = out / f"{case}{'-part' if methods else ''}.json"
        if not redo and not methods and (known := finished(path, facts)) is not None:
            print(f"-- {case}: has a result of these versions (--redo runs it again)", flush=True)
            records.append(known)
            continue
        left = seconds - (time.monotonic() - begin)
        if left < longest or left <= 0:
            print(f"-- out of time; run again for: {', '.join(wanted[position:])}", flush=True)
            break
        start = time.monotonic()
        records.append(_run_step(case, facts, path, run, min(MOST_SECONDS, left)))
        longest = max(longest, time.monotonic() - start)
    return records


def finished(path: Path, facts: dict[str, Any]) -> Record | None:
    """The record at ``path`` if its step ended and is of the same code, versions and card."""
    try:
        record = Record.read(path, _titles())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    same = all(record.machine.get(key) == facts.get(key) for key in _SAME)
    return record if same and record.settings.get("finished") and not record.failures else None


def _run_step(case: str, facts: dict[str, Any], path: Path, run: Run, seconds: float) -> Record:
    record = Record("gpu", _titles(), {"finished": False}, dict(facts))

    def keep(row: Row) -> None:
        record.rows.append(row)
        record.write(path)
        print(table([row]).splitlines()[-1], flush=True)

    begin = time.monotonic()
    error = run([case], keep, seconds)
    record.case_seconds[case] = round(time.monotonic() - begin, 1)
    record.settings["finished"] = error is None
    if error is not None:
        record.failures.append({"case": case, "error": error})
    record.write(path)
    print(f"-- {case}: {record.case_seconds[case]} s{f', FAILED: {error}' if error else ''}", flush=True)
    return record


def _child(options: argparse.Namespace) -> Run:
    def run(case: Sequence[str], on_row: Callable[[Row], None], seconds: float) -> str | None:
        paths = [BENCHMARKS, BENCHMARKS.parent / "src"]
        given = filter(None, [os.environ.get("PYTHONPATH")])
        with tempfile.TemporaryDirectory() as caches:
            environment = {"XDG_CACHE_HOME": caches, "PYTHONPATH": os.pathsep.join([*map(str, paths), *given])}
            arguments = [__file__, "--child", *case, *(["--toy"] if options.toy else [])]
            if options.methods:
                arguments += ["--methods", *options.methods]
            return run_child(arguments, on_row, environment, seconds)

    return run


def _titles() -> dict[str, str]:
    return {"card": "On a card: PyTorch's means and Ebbtide at the same peaks"}


def _others(wanted: Sequence[str], facts: dict[str, Any], out: Path) -> list[Record]:
    """Records of today's code of the cases that are not ``wanted``."""
    from cards.steps import CASES

    known = (finished(out / f"{case}.json", facts) for case in CASES if case not in wanted)
    return [record for record in known if record is not None]


def _summary(records: Sequence[Record], facts: dict[str, Any]) -> Record:
    """All steps in one table."""
    summary = Record("gpu", _titles(), {"steps": len(records)}, facts)
    for record in records:
        summary.take(record)
    return summary


if __name__ == "__main__":
    sys.exit(main())
