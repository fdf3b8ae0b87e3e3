"""What planning adds to the first step of a script that ran before: the plan cache, cold and warm."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import partial

import torch

import ebbtide
from ebbtide.planners.search.smallest import forget_smallest
from ebbtide.step.provenance import Planned
from ebbtide_published.zoo.small import SMALL
from harness.record import Row, at_most, holds

TITLE = "Plan cache: seconds that planning adds to capture, first and second start of the same script"
CASES = ("gpt", "resnet50", "lstm_lm")
QUICK = ("gpt",)
MOST_SECONDS = 1.0


def rows(name: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = directory  # platformdirs' place on Linux
        start = partial(_start, name)
        cold, warm = start(), start()
    yield Row(
        "warm",
        {
            "case": name,
            "ops": len(cold.program.ops),
            "cold_seconds": cold.plan_seconds,
            "warm_seconds": warm.plan_seconds,
            "overhead": warm.overhead,
        },
        (
            holds(
                "taken from the cache",
                (cold.provenance.planned, warm.provenance.planned) == (Planned.SEARCHED, Planned.CACHED),
            ),
            holds("the same plan", warm.schedule == cold.schedule),
            at_most("seconds", warm.plan_seconds, MOST_SECONDS),
        ),
    )


def _start(name: str) -> ebbtide.Plan:
    forget_smallest()  # as a new process does not know it
    case = SMALL[name]()
    ebbtide.fit(case.model, "90%")
    outputs = case.model(*case.args, **(case.kwargs or {}))
    (outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]).backward()
    plan = ebbtide.plan_of(case.model)
    assert plan is not None
    return plan
