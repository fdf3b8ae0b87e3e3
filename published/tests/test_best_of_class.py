"""``auto`` is no worse than a published planner of its class at the same effort: thirty programs with fixed seeds.

``benchmarks/planners.py --only best`` asks the same of a thousand.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ebbtide.planners import Interrupt, Problem, Status, planner_named, planner_names
from ebbtide.planners.search.smallest import smallest_schedule
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.simulate import overhead_of
from ebbtide.step.unplanned import unplanned_bytes

EFFORT = 300
TOLERANCE = 1e-6
OTHER_CLASS = {"auto", "auto_free", "anneal"}
CHILD = {"retention"}  # starts a process for each plan: in the benchmark
EXACT = {"checkmate", "checkmate_free", "checkmate_lp", "checkmate_lp_pure"}
EXACT_OPS, EXACT_SECONDS = 14, 2.0
SEEDS = range(30)


def program_of(seed: int) -> Program:
    """A forward whose ops read some of the last results, and a backward that visits them in reverse."""
    rng = random.Random(seed)
    forward = rng.choice((4, 6, 8, 12, 20, 40))
    buffers: list[Buffer] = []
    ops: list[Op] = []

    def op(inputs: set[int], size: int) -> int:
        buffers.append(Buffer(f"b{len(buffers)}", size, len(ops)))
        seconds = rng.randint(1, 9) * 1e-3
        ops.append(Op(f"op{len(ops)}", "test", tuple(sorted(inputs)), (len(buffers) - 1,), seconds=seconds))
        return len(buffers) - 1

    for index in range(forward):
        op({index - 1, rng.randrange(max(index - 5, 0), index)} if index else set(), rng.randint(1, 12))
    flow = forward - 1
    for index in range(forward - 1, -1, -1):
        flow = op({flow, index, max(index - 1, 0)}, buffers[index].bytes)
    return Program("mirrored", tuple(ops), tuple(buffers), forward, gradients=(flow,))


def problem_of(seed: int) -> Problem:
    program = program_of(seed)
    smallest, _ = smallest_schedule(program, effort=100)
    share = random.Random(-seed).uniform(0.05, 0.9)
    return Problem(program, int(smallest + share * (unplanned_bytes(program) - smallest)), effort=EFFORT)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_other_planner_of_its_class_is_better(seed: int) -> None:
    problem = problem_of(seed)
    ours = planner_named("auto")(problem)
    if ours.status is Status.OPTIMAL:
        return
    least = float("inf") if ours.schedule is None else overhead_of(problem.program, ours.schedule)
    left_out = OTHER_CLASS | CHILD | (EXACT if len(problem.program.ops) > EXACT_OPS else set())
    for name in sorted(set(planner_names()) - left_out):
        interrupt = Interrupt(EXACT_SECONDS if name in EXACT else None)
        theirs = planner_named(name)(replace(problem, interrupt=interrupt)).schedule
        assert theirs is None or overhead_of(problem.program, theirs) >= least - TOLERANCE, name
