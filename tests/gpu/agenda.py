"""What is asked of a card, the most important first, in as many seconds as there are: ``make gpu``.

    python tests/gpu/agenda.py [--seconds N] [--only NAME ...] [--again] [--list] [--results FILE]

1. An *entry* is a command with a name, a priority (1 comes first) and the seconds that it should take, which are
   those that it last took where that is known.
2. An entry begins only if its seconds fit into what is left; a shorter one after it may still. One that would go on
   after the last second is ended.
3. What ended is written to FILE at once. An entry that ended well on the same code, torch and card is skipped, so that
   a run goes on where another was cut off.

Nothing is imported but the standard library before it is known that there is a card.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu" / "agenda.json"
SOURCES = ("src/ebbtide", "published/src", "tests/gpu", "benchmarks/cards")
SECONDS = 300.0
WORKERS = ("--numprocesses=4", "--dist=worksteal") if importlib.util.find_spec("xdist") else ()
PLUGINS = ("-p", "no:cacheprovider", "-p", "no:benchmark")  # the latter warns beside xdist, which ends a run
NO_CARD = "no CUDA device: torch.cuda.is_available() is false here; `make gpu` needs a card"
TOO_LATE = "ended: the time was over"
TESTS = "tests"


@dataclass(frozen=True)
class Entry:
    """Definition 1.

    Attributes:
        name: unique.
        priority: 1 comes first; entries of one priority keep the order of the agenda.
        seconds: that it should take on one card, from its start to its end.
        command: arguments of this interpreter.
    """

    name: str
    priority: int
    seconds: float
    command: tuple[str, ...]


def _tests(name: str, priority: int, seconds: float, selected: str = "") -> Entry:
    """The tests of ``tests/gpu/test_cuda_NAME.py``, those that ``selected`` names (pytest's ``-k``)."""
    file, _, part = name.partition(": ")
    chosen = ("-k", selected) if part else ()
    path = f"tests/gpu/test_cuda_{file}.py"
    command = ("-m", "pytest", "-q", *PLUGINS, *WORKERS, path, *chosen)
    return Entry(f"{TESTS}, {name}", priority, seconds, command)


def _steps(case: str, priority: int, seconds: float, *words: str) -> Entry:
    """The rows of a case of ``benchmarks/gpu.py`` whose methods have one of ``words``; all for none."""
    methods = ("--methods", *words) if words else ()
    name = f"steps, {case}{f': {words[0]}' if words else ''}"
    return Entry(name, priority, seconds, ("benchmarks/gpu.py", "--only", case, *methods))


TRAINERS = "trainer or lightning or accelerate"
OPTIMIZERS = "adam or optimizer or host"
WHOLE = "card or graph or batch_of"
# On an H200 with 16 cores; "whole steps", "kernels" and "map" are guesses, and what takes 590 was not run whole.
AGENDA = (
    _tests("steps", 1, 40.0),
    _tests("training", 1, 50.0),
    _tests("moves", 2, 60.0),
    _tests("loops: optimizers", 2, 90.0, f"({OPTIMIZERS}) and not ({TRAINERS})"),
    _tests("loops: whole steps", 3, 60.0, f"({WHOLE}) and not ({OPTIMIZERS} or {TRAINERS})"),
    _tests("loops: kernels", 3, 120.0, f"not ({OPTIMIZERS} or {TRAINERS} or {WHOLE})"),
    _tests("loops: trainers", 3, 60.0, TRAINERS),
    _tests("map", 4, 120.0),
    _steps("gpt-bfloat16", 5, 190.0, "checkpoint"),
    *(
        _steps(case, 6, 590.0)
        for case in (
            "gpt-bfloat16", "gpt-float32", "llama-bfloat16", "llama-float32", "llama-lora-bfloat16",
            "llama-lora-float32", "bert-bfloat16", "bert-float32", "resnet50-bfloat16", "resnet50-float32",
            "unet-bfloat16", "unet-float32",
        )
    ),
)  # fmt: skip


def run_agenda(
    entries: Sequence[Entry],
    facts: Mapping[str, str],
    results: Path,
    *,
    seconds: float,
    run: Callable[[Sequence[str], float], str | None],
    again: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[str]]:
    """Run what is not done yet, within ``seconds``, and say what became of every entry.

    Args:
        entries: the agenda, in any order.
        facts: of the code and the card; a result of other ones does not count.
        results: the file of definition 3.
        seconds: for all together.
        run: runs a command for at most so many seconds; ``None`` if it ended well, else what went wrong.
        again: whether what has a result is run again.
        clock: seconds since whenever.

    Returns:
        Names of entries by ``done`` (before), ``passed``, ``failed`` and ``left``.
    """
    known = _read(results)
    became: dict[str, list[str]] = {"done": [], "passed": [], "failed": [], "left": []}
    end = clock() + seconds
    for entry in sorted(entries, key=lambda each: each.priority):
        before = known.get(entry.name, {})
        if not again and before.get("facts") == facts and before.get("error") is None:
            became["done"].append(entry.name)
            continue
        begin, needed = clock(), before.get("seconds", entry.seconds)
        if needed > end - begin:
            became["left"].append(f"{entry.name} ({needed:.0f} s)")
            continue
        print(f"-- {entry.name}: {needed:.0f} s of {end - begin:.0f} s", flush=True)
        error = run(entry.command, end - begin)
        taken = round(clock() - begin, 1)
        late = error == TOO_LATE  # it needs more than it was given: ask for more next time
        known[entry.name] = {"seconds": taken * (1.5 if late else 1.0), "error": error, "facts": dict(facts)}
        _write(results, known)
        became["failed" if error else "passed"].append(entry.name)
        print(f"-- {entry.name}: {error or 'passed'}, {taken} s", flush=True)
    return became


def _read(path: Path) -> dict[str, Any]:
    """What is known of entries; nothing where the file is missing or was cut off."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _write(path: Path, known: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".new").replace(path)


def run_command(command: Sequence[str], seconds: float) -> str | None:
    """Run this interpreter with the sources of the checkout."""
    ours = [str(ROOT / name) for name in ("src", "published/src", "tests", "benchmarks")]
    paths = [*ours, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return TOO_LATE
    return None if done.returncode == 0 else f"exit {done.returncode}"


def facts_here(torch: Any) -> dict[str, str]:
    """What a result is of: the code that is run, torch and the card."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return {"code": digest.hexdigest()[:12], "torch": torch.__version__, "card": torch.cuda.get_device_name(0)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all entries together ({SECONDS:g})")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="entries, or parts of their names")
    parser.add_argument("--again", action="store_true", help="also what has a result of the same code and card")
    parser.add_argument("--list", action="store_true", help="print the agenda and run nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are remembered")
    options = parser.parse_args()
    entries = [each for each in AGENDA if not options.only or any(word in each.name for word in options.only)]
    if options.list:
        for each in sorted(entries, key=lambda each: each.priority):
            print(f"{each.priority}  {each.seconds:4.0f} s  {each.name}")
        return 0
    import torch

    if not torch.cuda.is_available():
        print(NO_CARD, file=sys.stderr)
        return 2
    if any(importlib.util.find_spec(name) is None for name in ("pytest", "hypothesis")):
        print("pytest or hypothesis is not installed here: tests/gpu are left out")
        entries = [each for each in entries if not each.name.startswith(TESTS)]
    became = run_agenda(
        entries, facts_here(torch), options.results, seconds=options.seconds, run=run_command, again=options.again
    )
    for what, names in became.items():
        print(f"{what}: {', '.join(names) or 'nothing'}")
    return 1 if became["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
