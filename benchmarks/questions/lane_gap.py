"""The bound with lanes against the exact optimum of small programs, found by exhaustive search."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ebbtide.planners import Interrupt
from ebbtide.planners.hybrid.bounds import lane_bounds
from ebbtide.planners.hybrid.floor import floor_with_tiers
from ebbtide.step.program import Program
from harness.graphs import unplanned_bytes
from harness.record import Row, at_most
from questions.lane_violations import links_of
from questions.oracle import drawn
from questions.reach import chain

TITLE = "Programs of at most 10 ops: the bound with lanes against exhaustive search"
PROGRAMS, BATCH = 200, 50
CASES = tuple(f"{first}-{first + BATCH - 1}" for first in range(0, PROGRAMS, BATCH))
QUICK = CASES[:1]
MOST_NODES = 40_000  # of the search; a program that needs more is counted and left out
MOST_GAP = 0.02  # of the unplanned step
TOLERANCE = 1e-8


def program_of(seed: int) -> Program:
    """By turns a chain, and a program with branches, random and single-run ops."""
    rng = random.Random(seed)
    return chain(rng.randint(2, 5), seed) if seed % 2 == 0 else drawn(seed, least=4, most=8)


def rows(case: str, quick: bool) -> Iterator[Row]:
    from oracle.with_moves import TooManyStates, optimal_with_moves  # tests/ is on the path of a benchmark's children

    first, last = (int(part) for part in case.split("-"))
    gaps: list[float] = []
    left_out = violations = moved = 0
    for seed in range(first, first + 10 if quick else last + 1):
        rng = random.Random(seed)
        program = program_of(seed)
        links = links_of(program, rng)
        floor, peak = floor_with_tiers(program, links)[0], unplanned_bytes(program)
        if floor >= peak:
            continue
        budget = int(floor + rng.random() * (peak - floor))
        try:
            exact = optimal_with_moves(program, budget, links, most_nodes=MOST_NODES)
        except TooManyStates:
            left_out += 1
            continue
        bound, infeasible = 0.0, False
        for each in lane_bounds(program, budget, links, Interrupt()):
            bound, infeasible = each.bound, each.infeasible
        if exact is None:
            continue
        violations += infeasible or bound > exact[0] + TOLERANCE
        moved += exact[1].moves
        gaps.append(exact[0] - bound)
    gaps.sort()
    yield Row(
        "lane_gap",
        {
            "case": f"programs {case}",
            "compared": len(gaps),
            "left_out": left_out,
            "optimum_moves": moved,
            "violations": violations,
            "within_2_points": sum(gap <= MOST_GAP for gap in gaps),
            "median_gap": gaps[len(gaps) // 2],
            "worst_gap": gaps[-1],
        },
        (at_most("violations", violations, 0), at_most("worst gap", gaps[-1], MOST_GAP)),
    )
