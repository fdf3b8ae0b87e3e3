"""The largest batch within 16 GB and an overhead of 50 %, for every planner.

1. The search is on steps that are interpolated between two captures. The batch that it answers is captured as it is and
   planned again; where that plan does not hold, one less is tried.
2. *No plan can exceed* the batch at which the floor reaches the budget: what an op reads and makes, and what is there
   at the start, no plan moves.
3. ``ratio`` is over keep-all's largest batch; ``default_over`` is that of the default's largest batch to the row's.
4. ``checkmate_lp`` has :data:`LIMIT_SECONDS` for each plan; a batch for which it found none is not fit.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from ebbtide._api.batches import largest
from ebbtide.planners.hybrid.floor import floor_with_tiers
from harness.batched import Batched, Planned, planned
from harness.record import Row, above, at_least
from questions.libra_models import BUDGET, DEFAULT, MACHINE, MODELS, PLANNERS, batched, tiers_of

TITLE = "Largest batch within the 16.9 GB of v100-16gb at an overhead of at most 50 %; roofline, predicted"
CASES = tuple(MODELS)
QUICK = ("llama_small",)
MOST_OVERHEAD = 0.5
ALL = "four models"  # the case of rows over all of them
TARGET = 3.12  # the thesis' mean over PyTorch, at any overhead
LIMIT_SECONDS = 10.0
TRIES = 5
ABOVE = 1e-9


@dataclass(frozen=True)
class _Found:
    batch: int
    plan: Planned | None


def rows(case: str, quick: bool) -> Iterator[Row]:
    model = batched(case)
    base = model.unplanned(BUDGET, MODELS[case][1][0])
    labels = (DEFAULT, "libra") if quick else tuple(PLANNERS)
    yield from _rows(case, model, base, {label: _largest(model, base, label) for label in labels})


def summary(rows: list[Row]) -> Iterator[Row]:
    """Per planner the means over the models; the target is for all of them."""
    models = {row.columns["case"] for row in rows}
    for label in dict.fromkeys(str(row.columns["method"]) for row in rows):
        own = [row.columns for row in rows if row.columns["method"] == label]
        ratio = statistics.mean(each["ratio"] for each in own)
        over = statistics.mean(each["default_over"] for each in own)
        columns = {"case": ALL, "method": label, "ratio": ratio, "default_over": over, "note": f"{len(own)} models"}
        whole = label == DEFAULT and models == set(CASES)
        yield Row("batch", columns, (above("mean ratio over keep-all", ratio, TARGET),) if whole else ())


def _largest(model: Batched, base: int, label: str) -> _Found:
    """The largest batch of a planner (definition 1); keep-all's where it fits no larger one."""
    limit = LIMIT_SECONDS if label == "checkmate_lp" else None
    batch = model.largest(
        BUDGET,
        PLANNERS[label],
        tiers=tiers_of(label),
        most_overhead=MOST_OVERHEAD,
        guess=base + base // 4,
        coarse=max(1, base // 100),
        limit_seconds=limit,
    )
    plan = None
    for _ in range(TRIES):
        if batch <= base:
            return _Found(base, None)
        plan = planned(
            model.captured(batch), BUDGET, PLANNERS[label], MACHINE, tiers=tiers_of(label), limit_seconds=limit
        )
        if plan.overhead is not None and plan.overhead <= MOST_OVERHEAD + ABOVE:
            return _Found(batch, plan)
        batch -= 1
    return _Found(base, None)


def _rows(name: str, model: Batched, base: int, best: dict[str, _Found]) -> Iterator[Row]:
    at = model.at(base)
    most = largest(lambda b: model.at(b).resident_bytes + floor_with_tiers(model.at(b).program)[0] <= BUDGET, base)
    yield Row(
        "batch",
        {
            "case": name,
            "method": "keep_all",
            "batch": base,
            "ratio": 1.0,
            "overhead": 0.0,
            "samples_per_second": base / at.program.seconds,
            "default_over": best[DEFAULT].batch / base,
            "no_plan_can_exceed": most / base,
            "resident_share": at.resident_bytes / BUDGET,
        },
    )
    for label, found in best.items():
        columns: dict[str, object] = {
            "case": name,
            "method": label,
            "batch": found.batch,
            "ratio": found.batch / base,
            "default_over": best[DEFAULT].batch / found.batch,
        }
        if found.plan is None:
            columns["note"] = "no plan for a larger batch than keep-all's"
        else:
            columns |= {
                "overhead": found.plan.overhead,
                "bound": found.plan.answer.bound,
                "samples_per_second": found.batch / found.plan.seconds,
                "peak_bytes": found.plan.peak_bytes,
                "plan_cpu_seconds": found.plan.cpu_seconds,
            }
        ours = [at_least("the default, against libra", best[DEFAULT].batch, found.batch)] if "libra" in label else []
        yield Row("batch", columns, tuple(ours))
