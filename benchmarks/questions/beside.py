"""A better plan beside training: how soon it comes, how good it is, and what it takes from training meanwhile.

1. A model trains from its first call on under ``Options()``. While a search goes on beside it, runs of steps alternate
   in which that process may run and in which it is stopped, so that whatever else the machine does falls on both.
   ``slowed`` is the ratio of wall seconds of neighbours, its median, with the bootstrap's 95 % interval.
2. The search is started anew as often as pairs are needed; what it took from start to swap is counted of the first one,
   in wall seconds of training.
3. ``full overhead`` is that of a plan that was searched for before the first step (``refine=False``).
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from harness.record import Row, at_most
from questions.starts import MODELS, _child, _step

TITLE = "Beside training: seconds until a plan is refined, its overhead, and what training loses meanwhile"
CASES = ("gpt-24L 15%", "resnet50 70%", "llama-lora 60%")
QUICK = CASES[:1]
MOST_SECONDS = 60.0
MOST_SLOWED = 1.05
WITHIN_POINTS = 0.005  # of the full search's overhead: costs are measured anew
PAIRS = 15


def rows(name: str, quick: bool) -> Iterator[Row]:
    import torch

    import ebbtide

    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    torch.set_num_threads(1)
    key, _, budget = name.partition(" ")
    with tempfile.TemporaryDirectory() as caches:
        full = _child(key, "full", budget, caches)
    ratios: list[float] = []
    seconds, overheads = 0.0, (0.0, 0.0)
    while len(ratios) < (2 if quick else PAIRS):
        model, batches = MODELS[key]()
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # or its answer would be known
        ebbtide.fit(model, budget, progress=None)
        _step(model, batches[0])
        begin = time.monotonic()
        first = ebbtide.plan_of(model)
        for _ in range(2):  # proven and measured
            _step(model, batches[0])
        found = _until_refined(model, batches[0], seconds == 0.0)
        if seconds == 0.0:
            seconds = time.monotonic() - begin
            _step(model, batches[0])
            last = ebbtide.plan_of(model)
            assert first is not None
            assert last is not None
            overheads = (first.overhead, last.overhead)
        else:
            ratios += found
        ebbtide.unfit(model)
    low, high = _interval(ratios)
    yield Row(
        "beside",
        {
            "case": name,
            "seconds until refined": seconds,
            "first overhead": overheads[0],
            "refined overhead": overheads[1],
            "full overhead": full["overhead"],
            "slowed": statistics.median(ratios),
            "interval_low": low,
            "interval_high": high,
            "pairs": len(ratios),
        },
        (
            at_most("seconds until refined", seconds, MOST_SECONDS),
            at_most("training slowed, the interval's lower end", low, MOST_SLOWED),
            at_most("overhead over the full search's", overheads[1] - full["overhead"], WITHIN_POINTS),
        ),
    )


def _until_refined(model: Any, batch: Any, undisturbed: bool) -> list[float]:
    """Train until what is searched beside is found; wall seconds of a step beside it over one while it is stopped."""
    from ebbtide.engine.fitted_class import FITTED

    refinements = FITTED[model].refinements
    ratios: list[float] = []
    while (now := refinements._now) is not None:
        process = now[2].process
        if undisturbed:
            _timed(model, batch)
            continue
        seconds: dict[bool, float] = {}
        for stopped in random.sample((True, False), 2):
            if process.poll() is None:
                os.kill(process.pid, signal.SIGSTOP if stopped else signal.SIGCONT)
                seconds[stopped] = _timed(model, batch)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)
            ratios.append(seconds[False] / seconds[True])
        elif refinements._now is now:
            _timed(model, batch)
    return ratios


def _timed(model: Any, batch: Any) -> float:
    begin = time.perf_counter()
    _step(model, batch)
    return time.perf_counter() - begin


def _interval(values: list[float]) -> tuple[float, float]:
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]
