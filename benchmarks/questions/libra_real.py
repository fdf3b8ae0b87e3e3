"""Libra's four models, scaled down, really run through the disk under Libra's plans and the default's.

1. Models are those of ``zoo.small``; costs are measured here. The budget is :data:`SHARE` of the way from the least
   peak for which a plan that may move was found to the unplanned one.
2. Seconds are wall times of whole steps, the least of :data:`STEPS` after two; other jobs on the machine make them
   longer, and ``load`` says how busy it was. They are shown beside what is predicted, and have no target.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import ebbtide
from ebbtide import Budget, Case, Plan
from ebbtide._api.verify import Verifier
from ebbtide.errors import BudgetError
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.step.schedule import Offload
from ebbtide.transfers.disk import disk_tier
from ebbtide.transfers.links import this_machine
from ebbtide_published.zoo.small import SMALL
from harness.grid import captured
from harness.record import Row, at_most, holds
from questions.zoo import CAUSES

TITLE = "The four models scaled down, run on this machine through its disk: bits, bytes and seconds, one thread"
CASES = ("resnet50", "resnet152", "gpt2_small", "llama_small")
QUICK = ("llama_small",)
METHODS = ("libra", "libra:overlap=true", "auto")
SHARE = 0.4
EFFORT = 1000  # local-search moves
STEPS = 8
PREDICTION_TARGET = 0.001


def rows(case: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    subject = SMALL[case]()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        known = captured(subject)
        base, unplanned = known.keep_all, known.unplanned_above_bytes
        verifier = Verifier(
            subject.model, subject.args, subject.kwargs, options=ebbtide.Options(tiers=f"disk:{directory}")
        )
        machine = this_machine({"disk": disk_tier(Path(directory))})
        assert machine is not None
        smallest, _ = smallest_of(known.program, links=machine.links)
        above = smallest + int(SHARE * (unplanned - smallest))
        budget = Budget(bytes=base.resident_bytes + base.reserve_bytes + above)
        unplanned_seconds = _step_seconds(subject, base, directory)
        for method in METHODS:
            try:
                plan = make_plan(
                    known.program,
                    budget,
                    resident_bytes=base.resident_bytes,
                    reserve_bytes=base.reserve_bytes,
                    options=PlanningOptions(planner=method, effort=EFFORT, machine=machine, tiers=("disk",)),
                )
            except BudgetError as error:
                said = str(error).splitlines()[0]
                yield Row("real", {"case": case, "method": method, "of_unplanned": above / unplanned, "note": said})
                continue
            seen = verifier.check(plan)
            yield _row(
                case, method, plan, seen, above / unplanned, unplanned_seconds, _step_seconds(subject, plan, directory)
            )


def _step_seconds(case: Case, plan: Plan, directory: str) -> float:
    """The shortest step of a copy under a plan (definition 2): steps change buffers."""
    tiers = f"disk:{directory}" if plan.schedule.moves else None
    model = ebbtide.fit(
        copy.deepcopy(case.model), plan, tiers=tiers, progress=None, options=ebbtide.Options(verify=False)
    )
    seconds: list[float] = []
    with torch.random.fork_rng():
        for _ in range(STEPS + 2):
            model.zero_grad()
            begin = time.perf_counter()
            out = model(*case.args, **(case.kwargs or {}))
            (out if isinstance(out, torch.Tensor) else out["loss"]).backward()
            del out
            seconds.append(time.perf_counter() - begin)
    return min(seconds[2:])


def _row(
    case: str,
    method: str,
    plan: Plan,
    seen: ebbtide.Verification,
    share: float,
    unplanned_seconds: float,
    seconds: float,
) -> Row:
    columns = {
        "case": case,
        "method": method,
        "of_unplanned": share,
        "unplanned_bytes": seen.baseline_above_bytes,
        "budget_bytes": seen.budget_above_bytes,
        "predicted_bytes": seen.predicted_above_bytes,
        "measured_bytes": seen.measured_above_bytes,
        "equal_to_captured": seen.equal,
        "moved_buffers": len({each.buffer for each in plan.schedule.actions if isinstance(each, Offload)}),
        "reruns": len(plan.schedule.computes) - 1 - len(plan.program.ops),
        "predicted_overhead": plan.overhead,
        "measured_overhead": seconds / unplanned_seconds - 1.0,
        "unplanned_seconds": unplanned_seconds,
        "measured_seconds": seconds,
        "load": os.getloadavg()[0],
    }
    checks = (
        holds("bit-equal", seen.equal),
        holds("equal to eager, or with a stated cause", not seen.eager_differences or case in CAUSES),
        holds("within budget", seen.within_budget),
        at_most("prediction error", abs(seen.prediction_error), PREDICTION_TARGET),
    )
    return Row("real", columns, checks)
