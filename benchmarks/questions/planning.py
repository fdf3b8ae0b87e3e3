"""How long planning takes: a 2,000-op program on one core once numba is warm, and the first plan of a fresh process.

Seconds are CPU seconds of a process bound to one core: what a plan takes on one core, whatever else runs there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch

import ebbtide
from ebbtide.planners.search.smallest import smallest_schedule
from ebbtide.zoo import GPTConfig, gpt, mlp_chain
from harness.children import short_error
from harness.grid import Captured, captured
from harness.record import Row, at_most

TITLE = "Planning time on one core"
CASES = ("2,000 ops", "cold start")
QUICK = ("cold start",)
MOST_SECONDS, MOST_COLD_SECONDS = 5.0, 10.0

# 2,000 ops and a little more: 33 ops a block, forward and backward.
_DEEP = GPTConfig(vocabulary=256, length=64, layers=62, width=64, heads=4)


def rows(name: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    yield from _cold() if name == "cold start" else _deep()


def _deep() -> Iterator[Row]:
    small = _small()
    small.plan(small.grid_bytes(0.4))  # numba compiles, HiGHS loads
    known = captured(gpt(2, _DEEP))
    begin = time.process_time()
    smallest_schedule(known.program)  # a first plan has to find it, the next ones know it
    smallest_seconds = time.process_time() - begin
    for share in (0.6, 0.4, 0.2):
        above = known.grid_bytes(share)
        begin = time.process_time()
        plan = known.plan(above)
        seconds = time.process_time() - begin
        yield Row(
            "planning",
            {
                "case": f"gpt {_DEEP.layers}L",
                "ops": len(known.program.ops),
                "budget": f"{share:.0%}",
                "overhead": plan.overhead,
                "bound": plan.bound,
                "capture_and_costs_seconds": known.seconds,
                "smallest_seconds": smallest_seconds,
                "planner_seconds": seconds,
                "planning_seconds": smallest_seconds + seconds,
            },
            (at_most("planning seconds", smallest_seconds + seconds, MOST_SECONDS),),
        )


def _small() -> Captured:
    return captured(mlp_chain(64, layers=8, width=16))


def _cold() -> Iterator[Row]:
    """The first plan of a process whose numba cache is empty, then of one whose cache is full."""
    with tempfile.TemporaryDirectory() as directory:
        for label, target in (("numba cache empty", MOST_COLD_SECONDS), ("numba cache full", None)):
            seen = _first_plan(directory)
            yield Row(
                "planning",
                {
                    "case": f"first plan of a process, {label}",
                    "ops": seen["ops"],
                    "budget": "90% of the peak",
                    "import_seconds": seen["import"],
                    "planning_wall_seconds": seen["plan"],
                    "whole_call_seconds": seen["whole"],
                },
                () if target is None else (at_most("whole ebbtide.plan call, seconds", seen["whole"], target),),
            )


def _first_plan(numba_directory: str) -> dict[str, float]:
    code = "from questions.planning import first_plan; first_plan()"
    environment = {**os.environ, "NUMBA_CACHE_DIR": numba_directory}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(short_error(done.stderr.splitlines()))
    return json.loads(done.stdout.splitlines()[-1])


def first_plan() -> None:
    """In the child: one call of ``ebbtide.plan``, imports before it."""
    torch.set_num_threads(1)
    imported = time.process_time()
    case = mlp_chain(64, layers=8, width=16)
    begin = time.process_time()
    plan = ebbtide.plan(case.model, case.args, budget="90%")
    whole = time.process_time() - begin
    seen = {"import": imported, "whole": whole, "plan": plan.plan_seconds, "ops": len(plan.program.ops)}
    print(json.dumps(seen), flush=True)
