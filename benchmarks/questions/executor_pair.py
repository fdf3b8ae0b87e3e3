"""Keep-all CPU time of two versions of this library, old and new, in child processes that take turns.

1. A child has one version on its path, fits every model of the list to a budget that keeps everything, and then runs
   a step of one when it is told to, answering with its CPU seconds. It knows public names only.
2. The two children take turns round by round, and who begins alternates: what else the machine does falls on both.
3. How fast a process is depends on where its memory happens to lie, by up to a tenth here, for as long as it lives. So
   there are several pairs of fresh children, and the ratio is the median of theirs.
4. *Not above* is a ratio of at most 1.01. It is given beside the ratio of best steps and an interval for the median
   (the bootstrap's 90 %, over pairs).
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from harness.record import Row, at_most

__all__ = ["CASES", "ROUNDS", "compare"]

TITLE = "Executor: CPU seconds of the step that keeps everything, new code over old, in turns on one thread"
PATH = ("gpt-24L-d128-b8", "gpt-12L-d512-v4096")  # of questions/executor.py
MISSED = (
    "densenet121",
    "hf_bert",
    "resnet101",
    "vgg16",
    "resnet50 at full size",
)  # in results/models.json, on 2026-11-21
CASES = (*PATH, *MISSED)
PAIRS = 9
ROUNDS = 25
NOT_ABOVE = 1.01
WARM_UP = 3  # proof, measurement, and one more


def compare(old: Path, new: Path, cases: tuple[str, ...], rounds: int = ROUNDS) -> Iterator[Row]:
    """A row per case; ``old`` and ``new`` are the folders ``src`` of two versions."""
    for case in cases:
        yield _compare(old, new, case, rounds)


def _compare(old: Path, new: Path, case: str, rounds: int) -> Row:
    pairs = [_pair(old, new, case, rounds) for _ in range(PAIRS)]
    ratios = [statistics.median(pair["new"]) / statistics.median(pair["old"]) for pair in pairs]
    best = {label: min(value for pair in pairs for value in pair[label]) for label in ("old", "new")}
    ratio = statistics.median(ratios)
    low, high = _interval(ratios)
    columns = {
        "case": case,
        "old_seconds_median": statistics.median(statistics.median(pair["old"]) for pair in pairs),
        "new_seconds_median": statistics.median(statistics.median(pair["new"]) for pair in pairs),
        "new_over_old": ratio,
        "interval_low": low,
        "interval_high": high,
        "new_over_old_best": best["new"] / best["old"],
        "pairs": PAIRS,
        "rounds": rounds,
    }
    return Row("executor", columns, (at_most("of the old code's CPU time", ratio, NOT_ABOVE),))


def _pair(old: Path, new: Path, case: str, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every step, of two fresh children in turns."""
    children = {"old": _Child(old, case), "new": _Child(new, case)}
    seconds: dict[str, list[float]] = {"old": [], "new": []}
    try:
        for child in children.values():
            child.ready()
        for turn in range(rounds):
            for label in sorted(children, reverse=bool(turn % 2)):
                seconds[label].append(children[label].step())
    finally:
        for child in children.values():
            child.close()
    return seconds


def _interval(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """The middle 90 % of the median over resampled pairs."""
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[draws // 20], medians[-draws // 20 - 1]


class _Child:
    """One version with one model (definition 1)."""

    def __init__(self, source: Path, case: str) -> None:
        benchmarks = Path(__file__).resolve().parents[1]
        environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{benchmarks}"}
        command = [sys.executable, __file__, case, str(source)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ready(self) -> None:
        self._read()

    def step(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("SAYS "):
                return json.loads(line.removeprefix("SAYS "))
        raise RuntimeError(f"the child ended with exit code {self._process.wait()}; its error is above")


def _serve(case: str, source: str) -> None:
    """In a child: fit, warm up, then a step per line."""
    import torch

    import ebbtide

    assert Path(str(ebbtide.__file__)).is_relative_to(source), f"imported from {ebbtide.__file__}, not from {source}"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    subject = _builders()[case]()
    model = subject.model
    ebbtide.fit(model, "1000%", options=ebbtide.Options(planner="keep_all", verify=False))

    def step() -> float:
        model.zero_grad()
        begin = time.process_time()
        outputs = model(*subject.args, **(subject.kwargs or {}))
        (outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]).backward()
        return time.process_time() - begin

    for _ in range(WARM_UP):
        step()
    print("SAYS " + json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        print("SAYS " + json.dumps(step()), flush=True)


def _builders():
    """The models at the sizes of path.py and of models.py's question keep_all; public names of any version."""
    from functools import partial

    from ebbtide.zoo import GPTConfig, gpt, resnet50
    from ebbtide_published.zoo.small import SMALL

    sizes = {"vocabulary": 512, "length": 256, "layers": 24, "width": 128, "heads": 4}
    wider = {"vocabulary": 4096, "length": 256, "layers": 12, "width": 512, "heads": 8}
    return {
        **SMALL,
        PATH[0]: partial(gpt, 8, GPTConfig(**sizes)),
        PATH[1]: partial(gpt, 4, GPTConfig(**wider)),
        "resnet50 at full size": partial(resnet50, 8),
    }


if __name__ == "__main__":
    _serve(*sys.argv[1:])
