"""Run every benchmark: a sample of real cases in under an hour, or all that was not made with this version.

    python -m harness.bench             the sample below, into results/bench; goes on where it was cut off
    python -m harness.bench --full      every case that is not of this version, into results; likewise
    python -m harness.bench --list      what either runs

The sample has at least one case of every question that needs no card and no other torch, at its full size. At the end
stand, for each benchmark, the targets met and what of the committed result it contradicts (``checked``); the same is
kept for the page of benchmarks. A sample is of one commit: one of another commit, or of changed sources, runs anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.checked import Checked, compared, write
from harness.origin import BENCHMARKS, Origin

RESULTS = BENCHMARKS / "results"
BENCH = RESULTS / "bench"


@dataclass(frozen=True)
class Selection:
    """The sample of one benchmark.

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
    Selection("first_call", ("starts:readme",), 0.8),
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
    Selection("libra", ("steps:llama_small", "real:llama_small"), 2.0),
    Selection("published", ("vgg16",), 1.8),
    Selection("floors", ("sizes:float32, 1 threads",), 4.0),
    Selection("hybrid_bound", ("lane_gap:0-49", "lane_violations:165-179"), 2.0),
    Selection("hybrid", ("plan:gpt-12L a100", "grid:vgg16 a100", "disk:mlp_chain"), 1.5),
    Selection("pieces", ("gpt",), 0.4),
    Selection("truth", ("chain-64, 1 thread",), 1.5),
    Selection("reports", ("chain-",), 1.5, resumes=False),
    Selection("ranks", ("agreement:2",), 0.9),
    Selection("soak", ("soak:steps of changing shapes",), 1.5),
)
"""Every benchmark but ``gpu`` (`make gpu`) and ``torch_versions`` (`make test-torch`)."""


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
            print(f"-- {each.name}: is of this commit", flush=True)
            continue
        print(f"-- {each.name}, after {(time.monotonic() - begin) / 60:.1f} minutes", flush=True)
        if subprocess.run([sys.executable, *command], cwd=BENCHMARKS.parent, check=False).returncode:
            failed.append(each.name)
    if not options.full:
        found = _checked()
        write(found)
        print(f"\n{(time.monotonic() - begin) / 60:.1f} minutes\n\n" + "\n".join(map(_in_words, found)))
        failed += [each.name for each in SELECTION if each.name not in {*failed, *(one.name for one in found)}]
    if failed:
        print(f"\nmissed a target or failed: {', '.join(failed)}")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all that is not of this version; days")
    parser.add_argument("--list", action="store_true", help="print what would run and run nothing")
    parser.add_argument("--graphs", type=Path, help="folder of the published graphs, for planning and checkmate")
    return parser.parse_args()


def _selected(selection: Selection) -> list[str] | None:
    """The command of a selection, or nothing where it has run with what is checked out now."""
    out = BENCH / f"{selection.name}.json"
    origins = json.loads(out.read_text(encoding="utf-8"))["origins"] if out.exists() else ()
    of_this_commit = bool(origins) and all(Origin.from_json(each).is_of_this_commit for each in origins)
    if of_this_commit and not selection.resumes:
        return None
    if not of_this_commit:
        out.unlink(missing_ok=True)
    going_on = ["--resume"] if selection.resumes else []
    return [str(BENCHMARKS / f"{selection.name}.py"), "--only", *selection.only, "--out", str(out), *going_on]


def _full(name: str, graphs: Path | None) -> list[str]:
    """The command that runs what is not of this version."""
    with_graphs = ["--graphs", str(graphs)] if graphs is not None and name in ("planning", "checkmate") else []
    return [str(BENCHMARKS / f"{name}.py"), "--release", *with_graphs]


def _checked() -> list[Checked]:
    """Every sample that there is."""
    samples = {each.name: BENCH / f"{each.name}.json" for each in SELECTION}
    return [compared(name, _json(path), _json(RESULTS / path.name)) for name, path in samples.items() if path.exists()]


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _in_words(each: Checked) -> str:
    """Targets met, how many bytes and counts are those of the committed result, and what contradicts it."""
    met = f"{each.targets - len(each.missed)} of {each.targets} targets met"
    against = "".join(f"\n{'':15}contradicts the committed result: {what}" for what in each.contradicted)
    return f"{each.name:14} {met}; bytes and counts: {each.same} as committed, {each.other} other{against}"


if __name__ == "__main__":
    sys.exit(main())
