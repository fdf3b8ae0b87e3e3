"""The kinds of model in the tables, small, on this machine: a step of tenths of a second, really planned and run.

The budget is half-way between the smallest peak that recomputing reaches and the unplanned one, once recomputing alone
and once with the disk as a tier. Costs are measured here. Seconds are those of the best of :data:`STEPS` steps, planned
and unplanned in turn; other jobs on the machine make them longer, so the overhead has no target.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import ebbtide
from ebbtide import Budget, Case, Plan, Verification
from ebbtide._api.verify import Verifier
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.transfers.disk import disk_tier
from ebbtide.transfers.links import this_machine
from ebbtide_published.zoo.small import SMALL
from harness.grid import Captured, captured
from harness.record import Row, at_most, holds

TITLE = "The tables' models at small size on this machine, one thread"
CASES = ("resnet50", "inception_v3", "dcgan", "nmt", "lstm_lm")
QUICK = ("dcgan",)
SHARE = 0.5
EFFORT = 1000  # local-search moves
STEPS = 5
PREDICTION_TARGET = 0.001


def rows(case: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    subject = SMALL[case]()
    known = captured(subject)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        disk = f"disk:{directory}"
        machine = this_machine({"disk": disk_tier(Path(directory))})
        moving = PlanningOptions(effort=EFFORT, machine=machine, tiers=("disk",))
        for options, where in ((PlanningOptions(effort=EFFORT), None), (moving, disk)):
            plan = _planned(known, options)
            seen = Verifier(subject.model, subject.args, subject.kwargs, options=ebbtide.Options(tiers=where)).check(
                plan
            )
            yield _row(case, plan, seen, _overhead(subject, known.keep_all, plan, where))


def _planned(known: Captured, options: PlanningOptions) -> Plan:
    base = known.keep_all
    budget = Budget(bytes=base.resident_bytes + base.reserve_bytes + known.grid_bytes(SHARE))
    return make_plan(
        known.program,
        budget,
        resident_bytes=base.resident_bytes,
        reserve_bytes=base.reserve_bytes,
        options=options,
    )


def _overhead(case: Case, unplanned: Plan, plan: Plan, disk: str | None) -> float:
    """Of the best planned step over the best unplanned one, measured."""
    steps = [_step(case, unplanned, None), _step(case, plan, disk)]
    best = [float("inf"), float("inf")]
    for turn in range(STEPS + 1):
        for which, step in enumerate(steps):
            begin = time.perf_counter()
            step()
            if turn:  # the first sets up
                best[which] = min(best[which], time.perf_counter() - begin)
    return best[1] / best[0] - 1.0


def _step(case: Case, plan: Plan, disk: str | None) -> Callable[[], None]:
    """A training step of a copy: steps change buffers."""
    model = ebbtide.fit(
        copy.deepcopy(case.model), plan, tiers=disk, progress=None, options=ebbtide.Options(verify=False)
    )

    def step() -> None:
        model.zero_grad()
        model(*case.args, **(case.kwargs or {})).backward()

    return step


def _row(case: str, plan: Plan, seen: Verification, overhead: float) -> Row:
    moved = plan.timeline.tier_bytes.get("disk")
    columns = {
        "case": case,
        "method": "auto, disk" if plan.tiers else "auto",
        "ops": len(plan.program.ops),
        "unplanned_bytes": seen.baseline_above_bytes,
        "budget_bytes": seen.budget_above_bytes,
        "predicted_bytes": seen.predicted_above_bytes,
        "measured_bytes": seen.measured_above_bytes,
        "moved_bytes": 0 if moved is None else int(moved.max()),
        "reruns": len(plan.schedule.computes) - 1 - len(plan.program.ops),
        "predicted_overhead_percent": 100 * plan.overhead,
        "bound_percent": None if plan.bound is None else 100 * plan.bound,
        "measured_overhead_percent": 100 * overhead,
    }
    checks = (
        holds("bit-equal", seen.equal),
        holds("within budget", seen.within_budget),
        at_most("prediction error of bytes", abs(seen.prediction_error), PREDICTION_TARGET),
    )
    return Row("real", columns, checks)
