"""What planning costs where buffers may move: CPU seconds with a host tier against recomputing alone.

1. Both plans are made in turn, several times, in one process; medians are compared. Budgets are those of
   ``hybrid_plan``. A case is some 600 ops, or some 5,000, of which the seconds themselves have a target.
2. Planning that only recomputes ends early where its optimum is proven, as it is of chains and of repeated blocks; with
   lanes no such proof is known, so the ratio is one of a search against a proof.
3. ``bound_cpu_seconds`` is what the first linear relaxation with lanes takes, and ``bound_times`` that over planning
   without tiers. The rest is whole numbers (two cuts), rounding, repair and annealing, a second or two at most where
   the first plan is near its bound: what closes the last tenths of a percent.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch._subclasses.fake_tensor import FakeTensorMode

from ebbflow import Case
from ebbflow._api.estimate import capture_ahead
from ebbflow.planners.base import Problem, planner_named
from ebbflow.planners.bounds.floor import floor_bytes
from ebbflow.planners.hybrid.bounds import lane_bounds
from ebbflow.step.machine import machine_named
from ebbflow.step.simulate import overhead_of
from ebbflow.step.unplanned import unplanned_bytes
from ebbflow.zoo.gpt import GPTConfig, gpt
from ebbflow.zoo.mlp_chain import mlp_chain
from harness.record import Row, at_most

TITLE = "Planning seconds with a host tier against recomputing alone (v100-16gb, medians of interleaved runs)"
MODELS: dict[str, Callable[[], Case]] = {
    "gpt-18L": partial(gpt, 8, GPTConfig(vocabulary=32000, length=1024, width=768, heads=12, layers=18)),
    "mlp_chain-84": partial(mlp_chain, 512, layers=84, width=64),
    "gpt-152L": partial(gpt, 8, GPTConfig(vocabulary=32000, length=1024, width=768, heads=12, layers=152)),
}
LARGE = ("gpt-152L",)
CASES = tuple(MODELS)
QUICK = CASES[:1]
SHARES = (0.6, 0.4, 0.2)
RUNS = 3
MOST_TIMES, MOST_SECONDS = 2.0, 15.0


def rows(case: str, quick: bool) -> Iterator[Row]:
    machine = machine_named("v100-16gb")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = MODELS[case]()
    program = capture_ahead(model.model, model.args, model.kwargs, machine=machine, name=case).program
    floor, unplanned = 1.02 * floor_bytes(program)[0], unplanned_bytes(program)
    plan = planner_named("auto")
    both = Problem(program, unplanned - 1, machine=machine, tiers=("host",))
    plan(replace(both, above_budget_bytes=int(floor + 0.5 * (unplanned - floor)), effort=100))  # compiles
    for share in SHARES[:1] if quick else SHARES:
        both = replace(both, above_budget_bytes=int(floor + share * (unplanned - floor)))
        seconds: tuple[list[float], list[float]] = ([], [])
        relaxing: list[float] = []
        overheads = [0.0, 0.0]
        for _ in range(1 if quick or case in LARGE else RUNS):
            for index, asked in enumerate((replace(both, tiers=()), both)):
                begin = time.process_time()
                answer = plan(asked)
                seconds[index].append(time.process_time() - begin)
                assert answer.schedule is not None
                overheads[index] = overhead_of(program, answer.schedule, machine)
            begin = time.process_time()
            next(lane_bounds(program, both.above_budget_bytes, both.links, both.interrupt))
            relaxing.append(time.process_time() - begin)
        alone, hybrid = (statistics.median(each) for each in seconds)
        yield Row(
            "time",
            {
                "case": case,
                "ops": len(program.ops),
                "f": share,
                "recompute_overhead": overheads[0],
                "hybrid_overhead": overheads[1],
                "recompute_cpu_seconds": alone,
                "hybrid_cpu_seconds": hybrid,
                "times": hybrid / alone,
                "bound_cpu_seconds": statistics.median(relaxing),
                "bound_times": statistics.median(relaxing) / alone,
            },
            (
                at_most("seconds", hybrid, MOST_SECONDS)
                if case in LARGE
                else at_most("times", hybrid / alone, MOST_TIMES),
            ),
        )
