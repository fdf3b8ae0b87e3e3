"""How long the default planner takes from a program to its first and its final plan, from 500 to 50,000 ops.

Programs are one captured GPT with as many layers as it takes: layers are put in between its own
(``reductions.repeats``), which gives exactly what capture gives for such a model. Seconds are CPU seconds of one
thread; all that a plan takes is in them, the search for the smallest budget and the final checks among it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator

from ebbtide import Program
from ebbtide._api.estimate import capture_ahead
from ebbtide.options import Options
from ebbtide.planners import Progress
from ebbtide.planners.reductions.repeats import find_repeats, with_blocks
from ebbtide.planners.search.smallest import forget_smallest
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.units import Budget
from ebbtide.zoo import GPTConfig, gpt
from harness.record import Check, Row, at_most

TITLE = "Seconds from a program to its first and final plan (auto, CPU seconds on one core, medians)"
CASES = ("gpt",)
QUICK = CASES
MACHINE = "v100-16gb"
CONFIG = GPTConfig(vocabulary=32000, length=1024, layers=6, width=768, heads=12, dropout=0.1)
SIZES = (500, 1_500, 5_000, 15_000, 50_000)
SHARES = (0.6, 0.4)  # of the unplanned peak above the start
RUNS = 5
MOST_FIRST = {500: 0.05, 5_000: 0.3, 50_000: 2.0}
MOST_FINAL = {500: 1.5, 5_000: 5.0, 50_000: 20.0}
MOST_REPEATED = 3.0  # final, for 50,000 ops of repeated blocks


def rows(case: str, quick: bool) -> Iterator[Row]:
    small = gpt(8, CONFIG)
    captured = capture_ahead(small.model, small.args, small.kwargs, name=case, options=Options(machine=MACHINE)).program
    _timed(captured, 0.6)  # numba compiles, HiGHS loads
    finals: dict[int, float] = {}
    for ops in SIZES[:2] if quick else SIZES:
        program = _grown(captured, ops)
        for share in SHARES:
            runs = [_timed(program, share) for _ in range(1 if quick else RUNS)]
            first, final = (statistics.median(each) for each in list(zip(*runs, strict=True))[:2])
            finals[ops] = max(finals.get(ops, 0.0), final)
            overhead, bound = runs[0][2:]
            checks: list[Check] = []
            if ops in MOST_FIRST:
                checks += [at_most("first plan", first, MOST_FIRST[ops]), at_most("final", final, MOST_FINAL[ops])]
            if ops == SIZES[-1]:
                checks.append(at_most("final, repeated blocks", final, MOST_REPEATED))
            yield Row(
                "scaling",
                {
                    "case": case,
                    "ops": len(program.ops),
                    "budget": f"{share:.0%}",
                    "overhead_percent": 100 * overhead,
                    "gap_points": 100 * (overhead - bound),
                    "first_seconds": first,
                    "final_seconds": final,
                },
                tuple(checks),
            )
    least, most = min(finals), max(finals)
    growth = finals[most] / finals[least]
    allowed = most * math.log(most) / (least * math.log(least))
    yield Row(
        "scaling",
        {"case": f"growth, {least} to {most} ops", "final_seconds": growth},
        (at_most("times as long, against n log n", growth, allowed),),
    )


def _grown(program: Program, ops: int) -> Program:
    repeats = find_repeats(program)
    assert repeats is not None
    per_block = sum(region.period for region in repeats.regions)
    return with_blocks(repeats, repeats.blocks + max(0, round((ops - len(program.ops)) / per_block))).program


def _timed(program: Program, share: float) -> tuple[float, float, float, float]:
    """CPU seconds to the first and to the final plan, its overhead and bound."""
    anew = Program(**{name: getattr(program, name) for name in Program.__dataclass_fields__})  # no analysis is cached
    forget_smallest()
    first: list[float] = []

    def progress(known: Progress) -> None:
        if known.best_overhead is not None and not first:
            first.append(time.process_time() - begin)

    begin = time.process_time()
    budget = Budget.parse(f"{share:.0%}")
    plan = make_plan(anew, budget, resident_bytes=0, options=PlanningOptions(progress=progress))
    final = time.process_time() - begin
    return first[0] if first else final, final, plan.overhead, plan.bound or 0.0
