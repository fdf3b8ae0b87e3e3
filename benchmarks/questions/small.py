"""Small programs whose optimum is proven: the default planner finds it, within two seconds.

Half are chains of unequal steps (``reach``), half random programs with branches, several outputs, random and
single-run ops (``oracle``'s generator at larger sizes); three budgets each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from ebbtide.planners.search.smallest import smallest_schedule
from ebbtide.step.program import Program
from harness.graphs import unplanned_bytes
from harness.planned import plan_with
from harness.record import Row, at_least, at_most
from questions.oracle import drawn
from questions.reach import chain

TITLE = "Programs of at most 60 ops with a proven optimum: auto against checkmate (HiGHS, stage model)"
PROGRAMS, BATCH = 40, 10
CASES = tuple(f"{first}-{first + BATCH - 1}" for first in range(0, PROGRAMS, BATCH))
QUICK = CASES[:1]
SHARES = (0.7, 0.4, 0.15)  # of the way from the smallest found to the unplanned
PROVER_SECONDS, MOST_SECONDS = 20.0, 2.0
TOLERANCE = 3e-6


def program_of(seed: int) -> Program:
    """Chains of 16 to 60 ops for even seeds, random programs of 20 to 60 ops for odd ones."""
    rng = random.Random(seed)
    return chain(rng.randint(8, 30), seed) if seed % 2 == 0 else drawn(seed, least=20, most=60)


def rows(case: str, quick: bool) -> Iterator[Row]:
    first, last = (int(part) for part in case.split("-"))
    plan_with("auto", program_of(0), unplanned_bytes(program_of(0)) // 2)  # numba compiles, HiGHS loads
    proven = equal = by_auto = 0
    worst, slowest, missed = 0.0, 0.0, []
    for seed in range(first, last + 1):
        program = program_of(seed)
        peak = unplanned_bytes(program)
        smallest, schedule = smallest_schedule(program)
        for share in SHARES:
            budget = int(smallest + share * (peak - smallest))
            ours = plan_with("auto", program, budget)
            exact = ours
            if not ours.proven:  # else its own bound is the proof
                exact = plan_with("checkmate", program, budget, limit_seconds=PROVER_SECONDS, seeds=(schedule,))
            if not exact.proven or exact.overhead is None:
                continue
            proven += 1
            by_auto += ours.proven
            slowest = max(slowest, ours.seconds)
            excess = float("inf") if ours.overhead is None else ours.overhead - exact.overhead
            worst = max(worst, excess)
            equal += excess <= TOLERANCE
            if excess > TOLERANCE:
                missed.append(f"{seed} at {share:.0%}: {excess:.4f}")
    yield Row(
        "small",
        {
            "case": f"seeds {case}",
            "proven": proven,
            "auto_equal": equal,
            "auto_proved_itself": by_auto,
            "worst_excess": worst,
            "slowest_seconds": slowest,
            "missed": "; ".join(missed),
        },
        (at_least("equal to the optimum", equal, proven), at_most("seconds", slowest, MOST_SECONDS)),
    )
