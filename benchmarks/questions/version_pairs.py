"""Two versions of this library, old and new, in child processes that take turns: a steady step, and planning.

1. A child has one version on its path, under whichever name it had then, and one model. It *warms up* and then takes a
   *turn* when it is told to, answering with its CPU seconds: for ``executor`` so many steps that keep everything as
   take :data:`TURN_SECONDS`, for ``planner`` one plan for each of :data:`SHARES`. It knows names that both have.
2. The two children of a *pair* take turns, and who begins alternates: what else the machine does falls on both.
3. How fast a process is depends on where its memory happens to lie, by up to a tenth here, for as long as it lives. So
   there are several pairs of fresh children. A pair's ratio is that of its children's medians; what is said is the
   median of theirs with its 95 % interval (the bootstrap's, over pairs).
4. Plans are compared on equal terms: costs by roofline for one machine of the catalogue, which measures nothing, the
   same budgets, the same seed and effort, and no answer kept from before.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from harness.record import Check, Row, at_most

__all__ = ["CASES", "TITLES", "compare"]

TITLES = {
    "executor": "Executor: CPU seconds of the step that keeps everything, new code over old, in turns on one thread",
    "planner": "Planner: CPU seconds of a plan, and its overhead, new code over old, with equal costs and seeds",
}
NOT_ABOVE = 1.02
PAIRS = {"executor": 9, "planner": 5}
TURNS = {"executor": 11, "planner": 3}
TURN_SECONDS = 0.1
WARM_UP = 8  # steps: proof, measurement, and until what is learned of user code is known
STEADY, WARM_UP_SECONDS = 101, 3.0  # the first hundred are recorded more often, and left out where they take no longer
SHARES = (0.6, 0.4, 0.2)  # of the way from the smallest to the unplanned peak
MACHINE = "v100-16gb"

_MODELS: dict[str, tuple[str, tuple[int, ...], dict[str, int]]] = {
    "chain-4": ("mlp_chain", (32,), {"layers": 4, "width": 64}),  # where what a call itself takes is most of a step
    "chain-64": ("mlp_chain", (512,), {"layers": 64, "width": 64}),
    "gpt-24L-d128-b8": ("gpt", (8,), {"vocabulary": 512, "length": 256, "layers": 24, "width": 128, "heads": 4}),
    "gpt-12L-d512-v4096": ("gpt", (4,), {"vocabulary": 4096, "length": 256, "layers": 12, "width": 512, "heads": 8}),
}
"""A function of the zoo, its batch, and sizes: the models of ``path.py``, and a small one."""
CASES = tuple(_MODELS)


def compare(question: str, old: Path, new: Path, cases: tuple[str, ...], turns: int | None = None) -> Iterator[Row]:
    """A row per case; ``old`` and ``new`` are the folders ``src`` of two versions."""
    for case in cases:
        pairs = [_pair(question, old, new, case, turns or TURNS[question]) for _ in range(PAIRS[question])]
        yield _row(question, case, pairs)


_Pair = dict[str, list[dict[str, Any]]]
"""What the two children of a pair, ``old`` and ``new``, have said of each of their turns."""


def _row(question: str, case: str, pairs: list[_Pair]) -> Row:
    medians = [{label: statistics.median(each["seconds"] for each in pair[label]) for label in pair} for pair in pairs]
    ratios = [pair["new"] / pair["old"] for pair in medians]
    ratio = statistics.median(ratios)
    low, high = _interval(ratios)
    columns: dict[str, Any] = {
        "case": case,
        "old_seconds_median": statistics.median(pair["old"] for pair in medians),
        "new_seconds_median": statistics.median(pair["new"] for pair in medians),
        "new_over_old": ratio,
        "interval_low": low,
        "interval_high": high,
        "pairs": len(pairs),
        "turns": len(pairs[0]["new"]),
    }
    checks: list[Check] = [at_most("of the old code's CPU time", ratio, NOT_ABOVE)]
    if question == "planner":
        for index, share in enumerate(SHARES):
            old, new = (pairs[0][label][0]["overheads"][index] for label in ("old", "new"))
            columns |= {f"old_overhead_{share:.0%}": old, f"new_overhead_{share:.0%}": new}
            checks.append(at_most(f"overhead above the old plan's at {share:.0%}", new - old, 0.0))
    return Row(question, columns, tuple(checks))


def _interval(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """The middle 95 % of the median over resampled pairs."""
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[draws // 40], medians[-draws // 40 - 1]


def _pair(question: str, old: Path, new: Path, case: str, turns: int) -> _Pair:
    """The turns of two fresh children."""
    children = {"old": _Child(question, old, case), "new": _Child(question, new, case)}
    said: _Pair = {"old": [], "new": []}
    try:
        for child in children.values():
            child.answer()
        for turn in range(turns):
            for label in sorted(children, reverse=bool(turn % 2)):
                said[label].append(children[label].turn())
    finally:
        for child in children.values():
            child.close()
    return said


class _Child:
    """One version with one model (definition 1)."""

    def __init__(self, question: str, source: Path, case: str) -> None:
        benchmarks = Path(__file__).resolve().parents[1]
        environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{benchmarks}"}
        command = [sys.executable, __file__, question, case, str(source)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def turn(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("SAYS "):
                return json.loads(line.removeprefix("SAYS "))
        raise RuntimeError(f"the child ended with exit code {self._process.wait()}; its error is above")


# -- in a child -----------------------------------------------------------------------------------------------


def _serve(question: str, case: str, source: str) -> None:
    """Warm up, then a turn per line."""
    import torch

    name = "ebbtide" if (Path(source) / "ebbtide").is_dir() else "ebbflow"
    library = import_module(name)
    assert Path(str(library.__file__)).is_relative_to(source), f"imported from {library.__file__}, not from {source}"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    turn = {"executor": _steps, "planner": _plans}[question](library, _subject(library, case))
    print("SAYS " + json.dumps({}), flush=True)
    for _ in sys.stdin:
        print("SAYS " + json.dumps(turn()), flush=True)


def _subject(library: Any, case: str) -> Any:
    zoo = import_module(f"{library.__name__}.zoo")
    function, batch, sizes = _MODELS[case]
    return zoo.gpt(*batch, zoo.GPTConfig(**sizes)) if function == "gpt" else zoo.mlp_chain(*batch, **sizes)


def _options(library: Any, **chosen: Any) -> dict[str, Any]:
    """Arguments for options, which were arguments of their own once."""
    return {"options": library.Options(**chosen)} if hasattr(library, "Options") else chosen


def _steps(library: Any, subject: Any) -> Callable[[], dict[str, Any]]:
    """CPU seconds of a step that keeps everything."""
    model, args = subject.model, subject.args
    library.fit(model, "1000%", **_options(library, planner="keep_all", verify=False))

    def steps(count: int) -> float:
        begin = time.process_time()
        for _ in range(count):
            for parameter in model.parameters():
                parameter.grad = None
            model(*args).backward()
        return (time.process_time() - begin) / count

    steps(WARM_UP)
    begin = time.process_time()
    for _ in range(STEADY - WARM_UP):
        if time.process_time() - begin > WARM_UP_SECONDS:
            break
        steps(1)
    count = max(1, round(TURN_SECONDS / max(steps(1), 1e-4)))
    return lambda: {"seconds": steps(count)}


def _plans(library: Any, subject: Any) -> Callable[[], dict[str, Any]]:
    """CPU seconds of plans for :data:`SHARES`, and their overheads (definition 4)."""
    pipeline = import_module(f"{library.__name__}.planning.pipeline")
    how = _options(library, planner="keep_all")
    known = library.plan(subject.model, subject.args, budget="1000%", machine=MACHINE, **how)
    there = known.resident_bytes + known.reserve_bytes
    smallest, most = known.smallest_bytes - there, known.baseline.above_bytes

    def plan(share: float) -> float:
        return pipeline.make_plan(
            known.program,
            library.Budget(bytes=there + smallest + int(share * (most - smallest))),
            resident_bytes=known.resident_bytes,
            reserve_bytes=known.reserve_bytes,
            options=pipeline.PlanningOptions(seed=0),
        ).overhead

    def turn() -> dict[str, Any]:
        begin = time.process_time()
        overheads = [plan(share) for share in SHARES]
        return {"seconds": (time.process_time() - begin) / len(SHARES), "overheads": overheads}

    plan(SHARES[0])  # numba compiles, HiGHS loads
    return turn


if __name__ == "__main__":
    _serve(*sys.argv[1:])
