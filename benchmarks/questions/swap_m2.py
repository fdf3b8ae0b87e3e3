"""M2: the peak of residual networks of up to 2000 layers at a batch of 32, by swapping (table 1b).

Nothing is fitted: PyTorch's unplanned step takes less than TensorFlow's, so absolute MB stand beside ratios; the two
deepest ran out of memory, and their blocks are spread as SuperNeurons has them (zoo). ``least_at_10_percent`` is the
least peak at an overhead of 10 % or less, within a thirty-second of what lies between the floor and keep-all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from ebbtide._api.estimate import AheadStep
from harness.batched import Planned, captured, unplanned_peak
from harness.record import Check, Row, at_most, holds
from questions.swap_cells import (
    DEFAULT,
    MOST_OVERHEAD,
    Method,
    floor_of,
    methods,
    plan_columns,
    verdict,
)
from questions.swap_sizes import CARD, MB, TABLES

TITLE = "M2: MB at a batch of 32 and 10 % overhead, by roofline (Meng et al. 2017, table 1b)"
CASES = tuple(TABLES["m2"])
QUICK = ("resnet101",)
BATCH = 32
PARTS = 32


def rows(case: str, quick: bool) -> Iterator[Row]:
    cell = TABLES["m2"][case]
    begin = time.process_time()
    step = captured(lambda: cell.make(BATCH), CARD)
    seconds = time.process_time() - begin
    budget = cell.reached * MB
    kept = unplanned_peak(step)
    named = {
        "case": case,
        "method": "keep_all",
        "size": cell.size,
        "ops": len(step.program.ops),
        "their_mb": "OOM" if cell.without is None else cell.without,
        "target_mb": cell.reached,
        "their_ratio": None if cell.without is None else cell.without / cell.reached,
    }
    yield Row(
        "m2",
        {
            **named,
            "at_target": "",
            "overhead_percent": 0.0,
            "bound_percent": 0.0,
            "peak_mb": kept / MB,
            "samples_per_second": BATCH / step.program.seconds,
            "capture_cpu_seconds": seconds,
        },
    )
    for method in methods()[:1] if quick else methods():
        floor = floor_of(step, method)
        found = method.plan(step, budget)
        outcome = verdict(found, floor, budget, MOST_OVERHEAD)
        least = _least(step, method, floor, kept) if method.searches(len(step.program.ops)) and not quick else None
        columns = {
            **named,
            "method": method.label,
            "at_target": outcome,
            **plan_columns(found, BATCH),
            "floor_mb": floor / MB,
            "least_at_10_percent_mb": None if least is None else least / MB,
            "ratio_there": None if least is None else kept / least,
            "plan_cpu_seconds": found.cpu_seconds,
        }
        yield Row("m2", columns, _checks(method, found, outcome, cell.reached))


def _checks(method: Method, found: Planned, outcome: str, target: int) -> tuple[Check, ...]:
    if method != DEFAULT:
        return ()
    if outcome == "reached":
        return (at_most("MB at 10 %", found.peak_bytes / MB, target),)
    return (holds(f"{target} MB is reached or forbidden by a proof", outcome.startswith("forbidden")),)


def _least(step: AheadStep, method: Method, floor: int, kept: int) -> int:
    """The least budget of an overhead of 10 % or less that is found."""
    low, high = floor, kept
    coarse = (kept - floor) // PARTS
    while high - low > coarse:
        middle = (low + high) // 2
        found = method.plan(step, middle, enough=MOST_OVERHEAD)
        if found.overhead is not None and found.overhead <= MOST_OVERHEAD:
            high = min(middle, found.peak_bytes)
        else:
            low = middle
    return high
