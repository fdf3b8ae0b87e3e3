"""Chains of equal steps at every number of slots: the default plan against Revolve's recurrence.

The chain is Checkmate's (``unit_chain``): ``L + 1`` forward ops, ``L`` backward ops that read the one before and their
mirror image. While one of those runs, what it reads and makes of the backward takes two units, so a budget of ``s + 2``
leaves ``s`` slots for forward values, that which is read among them. By the recurrence of Griewank & Walther (ACM TOMS
26(1), 2000), with the values before the first op for its free first state, that costs ``t(L + 1, s)`` forward
ops, of which ``L`` are the first sweep.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from harness.planned import plan_with
from harness.record import Row, at_least, at_most
from questions.unit_chain import unit_chain

TITLE = "Chains of equal steps at every number of slots: auto against Revolve's recurrence"
STAGES = (64, 100, 300)
BATCH = 100
CASES = tuple(
    f"{stages} stages, slots {first}-{min(first + BATCH - 1, stages)}"
    for stages in STAGES
    for first in range(1, stages + 1, BATCH)
)
QUICK = CASES[:1]
MOST_EXCESS, MOST_SECONDS = 1e-6, 10.0


def least_forward_ops(steps: int, slots: int) -> NDArray[np.float64]:
    """``t(l, s)`` for all ``l`` up to ``steps`` and ``s`` up to ``slots``, the first sweep included."""
    least = np.full((steps + 1, slots + 1), np.inf)
    least[:2] = 0
    for s in range(1, slots + 1):
        for length in range(2, steps + 1):
            m = np.arange(1, length)
            least[length, s] = (m + least[length - m, s - 1] + least[m, s]).min()
    return least


def rows(case: str, quick: bool) -> Iterator[Row]:
    stages = int(case.split()[0])
    low, high = (int(part) for part in case.split()[-1].split("-"))
    program = unit_chain(2 * stages + 1)
    plan_with("auto", unit_chain(17), 6)  # numba compiles
    least = least_forward_ops(stages + 1, high)
    equal = proven = 0
    worst = slowest = total = 0.0
    missed: list[str] = []
    for slots in range(low, high + 1):
        expected = float(least[stages + 1, slots] - stages) / len(program.ops)
        ours = plan_with("auto", program, slots + 2)
        excess = float("inf") if ours.overhead is None or not ours.legal else ours.overhead - expected
        equal += abs(excess) <= MOST_EXCESS
        proven += ours.proven
        worst, slowest, total = max(worst, excess), max(slowest, ours.cpu_seconds), total + ours.cpu_seconds
        if abs(excess) > MOST_EXCESS:
            missed.append(f"{slots}: {excess:.4f}")
    count = high + 1 - low
    yield Row(
        "revolve",
        {
            "case": case,
            "ops": len(program.ops),
            "slot_counts": count,
            "equal": equal,
            "proven": proven,
            "worst_excess": worst,
            "cpu_seconds_each": total / count,
            "slowest_cpu_seconds": slowest,
            "missed": "; ".join(missed),
        },
        (at_least("equal to the recurrence", equal, count), at_most("seconds", slowest, MOST_SECONDS)),
    )
