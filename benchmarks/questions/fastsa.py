"""FastSA's two claims on our zoo: half the peak at 7 % added time on average, a quarter at 18 % where that can be.

FastSA (Jin et al., NeurIPS 2023, section 5) reports means over 23 models of a peak of half and of a quarter of the
unplanned one. Programs are those of ``gap``; peaks are those above the step's start. Beside costs by roofline stands
one second an op, as FastSA takes it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ebbtide import Program
from ebbtide._api.estimate import capture_ahead
from ebbtide.options import Options
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.search.smallest import smallest_of
from harness.graphs import unplanned_bytes
from harness.planned import plan_with
from harness.record import Check, Row, at_most, holds
from questions.gap import MACHINE, MODELS

TITLE = "FastSA's claims on our zoo: added time at half and at a quarter of the peak (auto, v100-16gb by roofline)"
CASES = ("zoo",)
QUICK = CASES
UNIT = ", one second an op"
CLAIMS = {0.5: 7.0, 0.25: 18.0}  # share of the peak: percent of added time, mean


def rows(case: str, quick: bool) -> Iterator[Row]:
    percents: dict[tuple[str, float], list[float]] = {}
    for name, (_, build) in list(MODELS.items())[: 2 if quick else None]:
        model = build()
        captured = capture_ahead(
            model.model, model.args, model.kwargs, name=name, options=Options(machine=MACHINE)
        ).program
        unit = replace(captured, ops=tuple(replace(op, seconds=1.0) for op in captured.ops))
        for costs, program in (("", captured), (UNIT, unit)):
            for share in CLAIMS:
                row = _row(name, program, share, costs)
                percent = row.columns.get("added_percent")
                if isinstance(percent, float):
                    percents.setdefault((costs, share), []).append(percent)
                yield row
    for (costs, share), known in percents.items():
        label = f"mean of {len(known)} models{costs}"
        mean = statistics.mean(known)
        checks: tuple[Check, ...] = (at_most("mean added percent", mean, CLAIMS[share]),) if costs != UNIT else ()
        columns = {"case": label, "budget": f"{share:.0%} of the peak", "added_percent": mean}
        yield Row("fastsa", columns, checks)


def _row(name: str, program: Program, share: float, costs: str) -> Row:
    floor, _ = floor_bytes(program)
    budget = int(share * unplanned_bytes(program))
    columns: dict[str, Any] = {
        "case": name + costs,
        "ops": len(program.ops),
        "budget": f"{share:.0%} of the peak",
        "of_floor": budget / floor,
    }
    smallest, schedule = smallest_of(program)
    if budget < smallest:
        below = "below the floor" if budget < floor else "below the smallest found"
        return Row("fastsa", {**columns, "status": below})
    planned = plan_with("auto", program, budget, seeds=(schedule,))
    columns |= {
        "status": planned.answer.status.name,
        "added_percent": 100 * (planned.overhead or 0.0),
        "bound_percent": 100 * (planned.answer.bound or 0.0),
    }
    legal = planned.legal and planned.overhead is not None
    return Row("fastsa", columns, (holds("legal and within budget", legal),))
