"""Every zoo model through the disk tier: same bits, within budget, as predicted, below what recomputing can reach.

1. The budget at ``f`` is ``smallest + f * (unplanned - smallest)`` above the step's start, ``smallest`` being the least
   for which a plan that may move was found.
2. Transfers and waits are those of the lanes' own clocks over :data:`STEPS` steps after two; other jobs on the machine
   make them longer, and ``load`` says how busy it was. What is hidden of the transfers has a target in the best step,
   where the plan expects that much to be hidden.
"""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

import ebbtide
from ebbtide import Budget, Case, Plan
from ebbtide._api.verify import Verifier
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.transfers.disk import disk_tier
from ebbtide.transfers.links import this_machine
from ebbtide_published.zoo.small import SMALL
from harness.grid import Captured, captured
from harness.record import Row, at_least, at_most, holds
from questions.zoo import CAUSES

TITLE = "Zoo at small size through the disk, one thread"
CASES = tuple(SMALL)
QUICK = ("gpt",)
SHARES = (0.6, 0.4, 0.2)
EFFORT = 1000  # local-search moves
STEPS = 10
PREDICTION_TARGET = 0.001
LEAST_HIDDEN = 0.8


def rows(case: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    subject = SMALL[case]()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        known = captured(subject)
        verifier = Verifier(
            subject.model, subject.args, subject.kwargs, options=ebbtide.Options(tiers=f"disk:{directory}")
        )
        machine = this_machine({"disk": disk_tier(Path(directory))})
        assert machine is not None
        smallest, _ = smallest_of(known.program, links=machine.links)
        for share in (0.4,) if quick else SHARES:
            above = smallest + int(share * (known.unplanned_above_bytes - smallest))
            options = PlanningOptions(effort=EFFORT, machine=machine, tiers=("disk",))
            plan = _planned(known, above, options)
            yield _row(case, share, known, smallest, plan, verifier.check(plan), _traffic(subject, plan, directory))


def _planned(known: Captured, above_bytes: int, options: PlanningOptions) -> Plan:
    base = known.keep_all
    return make_plan(
        known.program,
        Budget(bytes=base.resident_bytes + base.reserve_bytes + above_bytes),
        resident_bytes=base.resident_bytes,
        reserve_bytes=base.reserve_bytes,
        options=options,
    )


def _traffic(case: Case, plan: Plan, directory: str) -> tuple[list[float], list[float]]:
    """Seconds of transfers and of waiting per step (definition 2), of a copy: steps change buffers."""
    model = ebbtide.fit(
        copy.deepcopy(case.model), plan, tiers=f"disk:{directory}", progress=None, options=ebbtide.Options(verify=False)
    )
    transfers: list[float] = []
    waits: list[float] = []
    with torch.random.fork_rng():
        for _ in range(STEPS + 2):
            model.zero_grad()
            out = model(*case.args, **(case.kwargs or {}))
            loss = out if isinstance(out, torch.Tensor) else out["loss"]
            loss.backward()
            del out, loss
            if (traffic := ebbtide.step_of(model).traffic) is not None:
                transfers.append(traffic.transfer_seconds)
                waits.append(traffic.waited_seconds)
    return transfers[2:], waits[2:]


def _row(
    name: str,
    share: float,
    known: Captured,
    smallest: int,
    plan: Plan,
    seen: ebbtide.Verification,
    traffic: tuple[list[float], list[float]],
) -> Row:
    timeline = plan.timeline
    transfers, waits = (_quartiles(each) for each in traffic)
    hidden = max((1 - w / t for t, w in zip(*traffic, strict=True) if t), default=1.0)
    expected = timeline.waited_seconds <= (1 - LEAST_HIDDEN) * timeline.transfer_seconds
    return Row(
        "disk",
        {
            "case": name,
            "f": share,
            "unplanned_bytes": seen.baseline_above_bytes,
            "smallest_recomputing_bytes": known.smallest_above_bytes,
            "smallest_moving_bytes": smallest,
            "budget_bytes": seen.budget_above_bytes,
            "predicted_bytes": seen.predicted_above_bytes,
            "measured_bytes": seen.measured_above_bytes,
            "equal_to_captured": seen.equal,
            "moved_bytes": int(timeline.tier_bytes["disk"].max()) if plan.schedule.moves else 0,
            "reruns": len(plan.schedule.computes) - 1 - len(plan.program.ops),
            "predicted_overhead": plan.overhead,
            "bound": plan.bound,
            "transfer_seconds_predicted": timeline.transfer_seconds,
            "transfer_seconds_quartiles": transfers,
            "waited_seconds_predicted": timeline.waited_seconds,
            "waited_seconds_quartiles": waits,
            "hidden_in_the_best_step": hidden,
            "load": os.getloadavg()[0],
        },
        (
            holds("bit-equal", seen.equal),
            holds("equal to eager, or with a stated cause", not seen.eager_differences or name in CAUSES),
            holds("within budget", seen.within_budget),
            at_most("prediction error", abs(seen.prediction_error), PREDICTION_TARGET),
            at_most("smallest, of that of recomputing", smallest / known.smallest_above_bytes, 1.0),
            *([at_least("hidden in the best step", hidden, LEAST_HIDDEN)] if expected else []),
        ),
    )


def _quartiles(values: list[float]) -> list[float]:
    return [] if len(values) < 2 else [round(each, 6) for each in statistics.quantiles(values, n=4)]
