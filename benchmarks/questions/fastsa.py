"""FastSA's two claims on our zoo: half the peak at 7 % added time on average, a quarter at 18 % where that can be.

FastSA (Jin et al., NeurIPS 2023, section 5) reports means over 23 models of a peak of half and of a quarter of the
unplanned one. Programs are those of ``gap``; peaks are those above the step's start.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from ebbflow.ahead import capture_ahead
from ebbflow.planners.floor import floor_bytes
from ebbflow.planners.smallest import smallest_schedule
from harness.graphs import unplanned_bytes
from harness.planned import plan_with
from harness.record import Check, Row, at_most, holds
from questions.gap import MACHINE, MODELS

TITLE = "FastSA's claims on our zoo: added time at half and at a quarter of the peak (auto, v100-16gb by roofline)"
CASES = ("zoo",)
QUICK = CASES
CLAIMS = {0.5: 7.0, 0.25: 18.0}  # share of the peak: percent of added time, mean


def rows(case: str, quick: bool) -> Iterator[Row]:
    percents: dict[float, list[float]] = {share: [] for share in CLAIMS}
    for name, (_, build) in list(MODELS.items())[: 2 if quick else None]:
        model = build()
        program = capture_ahead(model.model, model.args, model.kwargs, machine=MACHINE, name=name).program
        peak, (floor, _) = unplanned_bytes(program), floor_bytes(program)
        smallest, schedule = smallest_schedule(program)
        for share in CLAIMS:
            budget = int(share * peak)
            where = {"case": name, "ops": len(program.ops), "budget": f"{share:.0%} of the peak"}
            where |= {"of_floor": budget / floor}
            if budget < smallest:
                below = "below the floor" if budget < floor else "below the smallest found"
                yield Row("fastsa", {**where, "status": below})
                continue
            planned = plan_with("auto", program, budget, seeds=(schedule,))
            percent = 100 * (planned.overhead or 0.0)
            percents[share].append(percent)
            bound = 100 * (planned.answer.bound or 0.0)
            status = planned.answer.status.name
            checks: list[Check] = [holds("legal and within budget", planned.legal and planned.overhead is not None)]
            yield Row(
                "fastsa", {**where, "status": status, "added_percent": percent, "bound_percent": bound}, tuple(checks)
            )
    for share, most in CLAIMS.items():
        if percents[share]:
            mean = statistics.mean(percents[share])
            label = f"mean of {len(percents[share])} models at {share:.0%}"
            yield Row("fastsa", {"case": label, "added_percent": mean}, (at_most("mean added percent", mean, most),))
