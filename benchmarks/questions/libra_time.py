"""Overheads at keep-all's largest batch, within shares of the unplanned peak, with the link whole and halved.

1. Budgets are of the whole peak, resident bytes included. Where a share is below the floor of plans that may move, the
   row says so and is at 1.02 times that floor instead.
2. ``checkmate_lp`` has :data:`LIMIT_SECONDS`. Planners that only recompute give the same at both rates of the link and
   are asked once.
"""

from __future__ import annotations

from collections.abc import Iterator

from ebbtide._api.estimate import AheadStep
from ebbtide.planners.base import DEFAULT_EFFORT
from ebbtide.planners.hybrid.floor import floor_with_tiers
from harness.batched import Planned, planned, unplanned_peak, with_link
from harness.record import Check, Row, at_most, holds
from questions.libra_models import BUDGET, DEFAULT, MACHINE, MODELS, PLANNERS, batched, tiers_of

TITLE = "Overhead in percent at keep-all's largest batch by share of the unplanned peak, and CPU seconds of each plan"
CASES = tuple(MODELS)
QUICK = ("llama_small",)
SHARES = (0.8, 0.6, 0.4, 0.25)
LINKS = (1.0, 0.5)
LIMIT_SECONDS = 10.0
NEAR_FLOOR = 1.02
TOLERANCE = 1e-6


def rows(case: str, quick: bool) -> Iterator[Row]:
    model = batched(case)
    batch = model.unplanned(BUDGET, MODELS[case][1][0])
    step = model.captured(batch)
    peak = unplanned_peak(step)
    floor = step.resident_bytes + floor_with_tiers(step.program, MACHINE.links)[0]
    planned(step, peak - 1, "auto", MACHINE, tiers=("host",), effort=100)  # what is compiled at first use takes seconds
    for share in SHARES[:1] if quick else SHARES:
        alone: dict[str, Planned] = {}
        budget = int(max(share * peak, NEAR_FLOOR * floor))
        for rate in LINKS:
            yield _row(case, batch, step, share, floor / peak, budget, rate, alone, quick)


def _row(
    name: str,
    batch: int,
    step: AheadStep,
    share: float,
    floor: float,
    budget: int,
    rate: float,
    alone: dict[str, Planned],
    quick: bool,
) -> Row:
    machine = with_link(MACHINE, rate)
    columns: dict[str, object] = {
        "case": name,
        "batch": batch,
        "ops": len(step.program.ops),
        "share": share,
        "budget": f"{share:.0%}, link {rate:.0%}",
        "of_peak": budget / unplanned_peak(step),
        "floor": floor,
    }
    checks: list[Check] = []
    found: dict[str, Planned] = {}
    for label, planner in PLANNERS.items():
        if quick and label == "checkmate_lp":
            continue
        tiers = tiers_of(label)
        limit = LIMIT_SECONDS if label == "checkmate_lp" else None
        each = alone.get(label) or planned(
            step, budget, planner, machine, tiers=tiers, effort=DEFAULT_EFFORT, limit_seconds=limit
        )
        if not tiers:
            alone[label] = each
        found[label] = each
        columns[label] = each.answer.status.name if each.overhead is None else 100 * each.overhead
        if label == DEFAULT:
            columns["bound"] = 100 * (each.answer.bound or 0.0)
        checks.append(holds(f"{label} is legal", each.overhead is not None or each.answer.schedule is None))
    columns |= {f"{label} cpu s": each.cpu_seconds for label, each in found.items()}
    ours = found[DEFAULT].overhead
    others = {label: each.overhead for label, each in found.items() if label != DEFAULT and each.overhead is not None}
    checks.append(holds("the default has a plan wherever any has", ours is not None or not others))
    if ours is not None and others:
        best = min(others, key=lambda label: others[label])
        checks.append(at_most(f"the default, against {best}", ours, others[best] + TOLERANCE))
    return Row("time", columns, tuple(check for check in checks if not check.passed or "legal" not in check.what))
