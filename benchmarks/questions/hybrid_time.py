"""What planning costs where buffers may move: CPU seconds with a host tier against recomputing alone.

1. Both plans are made in turn, several times, in one process; medians are compared. Budgets are those of
   ``hybrid_plan``. A case is some 600 ops, or some 5,000, of which the seconds themselves have a target.
2. Planning that only recomputes ends early where its optimum is proven, as it is of chains and of repeated blocks; with
   lanes no such proof is known, so the ratio is one of a search against a proof.
3. ``bound_cpu_seconds`` is what the first linear relaxation with lanes takes, and ``least_times`` that and planning
   without tiers, whose plan is a start of every other, over planning without tiers: no search that has a bound takes
   less. ``overhead_at_2`` is the best plan that the search has at twice the time of planning without tiers: what ending
   there would cost. The rest is whole numbers, rounding, repair and annealing, which end within a tenth of a point of
   the bound.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch._subclasses.fake_tensor import FakeTensorMode

from ebbtide import Case
from ebbtide._api.estimate import capture_ahead
from ebbtide.options import Options
from ebbtide.planners.base import Problem, Progress
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.hybrid.bounds import lane_bounds
from ebbtide.planners.registry import planner_named
from ebbtide.step.machine import machine_named
from ebbtide.step.simulate import overhead_of
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.zoo.gpt import GPTConfig, gpt
from ebbtide.zoo.hf import hf_bert
from ebbtide.zoo.mlp_chain import mlp_chain
from ebbtide.zoo.resnet import resnet50
from harness.record import Row, at_most

TITLE = "Planning seconds with a host tier against recomputing alone (v100-16gb, medians of interleaved runs)"
MODELS: dict[str, Callable[[], Case]] = {
    "gpt-18L": partial(gpt, 8, GPTConfig(vocabulary=32000, length=1024, width=768, heads=12, layers=18)),
    "mlp_chain-84": partial(mlp_chain, 512, layers=84, width=64),
    "resnet50": partial(resnet50, 32, image=224),
    "bert": partial(hf_bert, 16, length=512, width=768, heads=12),
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
    program = capture_ahead(model.model, model.args, model.kwargs, name=case, options=Options(machine=machine)).program
    floor, unplanned = 1.02 * floor_bytes(program)[0], unplanned_bytes(program)
    plan = planner_named("auto")
    both = Problem(program, unplanned - 1, machine=machine, tiers=("host",))
    plan(replace(both, above_budget_bytes=int(floor + 0.5 * (unplanned - floor)), effort=100))  # compiles
    for share in SHARES[:1] if quick else SHARES:
        both = replace(both, above_budget_bytes=int(floor + share * (unplanned - floor)))
        seconds: tuple[list[float], list[float]] = ([], [])
        relaxing: list[float] = []
        overheads = [0.0, 0.0]
        known: list[tuple[float, float]] = []  # seconds of planning with tiers, and the best overhead by then
        for _ in range(1 if quick or case in LARGE else RUNS):
            for index, asked in enumerate((replace(both, tiers=()), both)):
                known.clear()
                begin = time.process_time()
                answer = plan(replace(asked, progress=partial(_note, known, begin)))
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
                "least_times": 1.0 + statistics.median(relaxing) / alone,
                "overhead_at_2": min((best for when, best in known if when <= MOST_TIMES * alone), default=None),
            },
            (
                at_most("seconds", hybrid, MOST_SECONDS)
                if case in LARGE
                else at_most("times", hybrid / alone, MOST_TIMES),
            ),
        )


def _note(known: list[tuple[float, float]], begin: float, progress: Progress) -> None:
    if progress.best_overhead is not None:
        known.append((time.process_time() - begin, progress.best_overhead))
