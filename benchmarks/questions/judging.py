"""What it costs on a CPU that every step is judged: the step as it is against one that is not, on one thread, in turns.

1. A turn is 100 steady steps, of which one is recorded by the allocator, as from the hundredth step on; of large models
   it is the one recorded step and one that is not, weighted 1 to 99.
2. Judged and unjudged turns alternate in one process, so that what else the machine does falls on both. The ratio is
   the median over pairs, with the bootstrap's 95 % interval.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

import ebbtide
from ebbtide.engine import judging
from ebbtide.zoo import mlp_chain
from harness.path_models import CASES as PATH_MODELS
from harness.path_models import build
from harness.record import Row, at_most

TITLE = "Judging every step: CPU seconds of steps that are judged over steps that are not, one thread, in turns"
SMALL = "chain-4"
CASES = (SMALL, *PATH_MODELS)
"""Without a target the first, a step of a millisecond, of which a record takes two."""
NOT_ABOVE, WIDEST = 1.01, 0.04
PAIRS, EVERY, LARGE_SECONDS = 15, 100, 0.1


def rows(name: str) -> Iterator[Row]:
    torch.set_num_threads(1)
    case = mlp_chain(32, layers=4, width=64) if name == SMALL else build(name)
    ebbtide.fit(case.model, "1000%", progress=None, options=ebbtide.Options(planner="keep_all", verify=False))
    for _ in range(12):
        single = _seconds(case, 1)
    large = single > LARGE_SECONDS
    ratios: list[float] = []
    for pair in range(PAIRS):
        judged = {True: 0.0, False: 0.0}
        for judges in (True, False) if pair % 2 else (False, True):
            with patch.object(judging.Judge, "watch", _watching(judges, always=large)):
                judged[judges] = _seconds(case, 1 if large else EVERY)
        ratio = judged[True] / judged[False]
        ratios.append(1 + (ratio - 1) / EVERY if large else ratio)
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(ratios, k=len(ratios))) for _ in range(2000))
    low, median, high = medians[50], statistics.median(ratios), medians[-51]
    bound = low if high - low <= WIDEST else median
    yield Row(
        "judging",
        {
            "case": name,
            "step_seconds": single,
            "judged_over_not": median,
            "interval_low": low,
            "interval_high": high,
            "pairs": PAIRS,
            "steps_a_turn": 1 if large else EVERY,
        },
        () if name == SMALL else (at_most("of an unjudged step's CPU time", bound, NOT_ABOVE),),
    )


def _watching(judges: bool, *, always: bool) -> Any:
    watch = judging.Judge.watch

    def watching(judge: Any, *args: Any, **kwargs: Any) -> None:
        if not judges:
            return
        if always:  # the step that would be recorded once in a hundred
            for sample in judge._samples.values():
                sample.due = 0
        watch(judge, *args, **kwargs)

    return watching


def _seconds(case: Any, steps: int) -> float:
    """CPU seconds of so many steps."""
    begin = time.process_time()
    for _ in range(steps):
        case.model.zero_grad()
        case.model(*case.args).backward()
    return time.process_time() - begin
