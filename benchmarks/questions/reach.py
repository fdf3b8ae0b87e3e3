"""The largest program that each planner proves optimal in a time limit: chains of unequal steps, half the peak."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ebbtide.planners.base import DEFAULT_EFFORT
from ebbtide.planners.search.smallest import smallest_schedule
from ebbtide.step.program import Buffer, Op, Program
from harness.graphs import unplanned_bytes
from harness.planned import plan_with
from harness.record import Row

TITLE = "Reach: the largest chain proven optimal in 60 s and 600 s, and seconds to plan"
EXACT = ("checkmate", "checkmate_free", "retention", "auto")
CASES = tuple(f"{planner} {limit}" for planner in EXACT for limit in (60, 600))
QUICK = ("checkmate 60",)
SIZES = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
WITHOUT_END = 10**9
SHARE = 0.4  # of the way from the smallest found to the unplanned


def chain(layers: int, seed: int = 0) -> Program:
    """``layers`` forward ops and as many backward ops that read them; sizes and costs drawn."""
    rng = random.Random(seed)
    sizes = [rng.randint(4, 64) for _ in range(layers)]
    costs = [rng.randint(1, 20) for _ in range(layers)]
    ops: list[Op] = []
    buffers: list[Buffer] = []
    for k in range(2 * layers):
        mirror = 2 * layers - 1 - k
        inputs = {k - 1, mirror} if k >= layers else {k - 1}
        at = min(k, mirror)
        ops.append(
            Op(
                str(k),
                "step",
                tuple(sorted(i for i in inputs if i >= 0)),
                (k,),
                seconds=costs[at] * (1 + (k >= layers)),
            )
        )
        buffers.append(Buffer(str(k), sizes[at], k))
    return Program(f"chain-{layers}", tuple(ops), tuple(buffers), layers, gradients=(2 * layers - 1,))


def rows(case: str, quick: bool) -> Iterator[Row]:
    planner, limit = case.split()
    reached = 0
    for layers in SIZES[:3] if quick else SIZES:
        program = chain(layers)
        peak = unplanned_bytes(program)
        smallest, _ = smallest_schedule(program)
        budget = int(smallest + SHARE * (peak - smallest))
        # The effort of retention would end it before the clock does.
        effort = WITHOUT_END if planner == "retention" else DEFAULT_EFFORT
        planned = plan_with(planner, program, budget, limit_seconds=float(limit), effort=effort)
        proven = planned.proven and planned.seconds <= 1.1 * float(limit)
        reached = len(program.ops) if proven else reached
        yield Row(
            "reach",
            {
                "case": f"{planner}, {limit} s",
                "limit_seconds": int(limit),
                "ops": len(program.ops),
                "status": planned.answer.status.name,
                "overhead": planned.overhead,
                "bound": planned.answer.bound,
                "largest_proven": reached,
                "seconds": planned.seconds,
            },
        )
        if not proven:
            return
