"""The default planner on all published graphs, from 90 % of the keep-all peak down to the floor, in both orders."""

from __future__ import annotations

from collections.abc import Iterator

from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.search.smallest import smallest_schedule
from harness.graphs import ABSENT, published, unplanned_bytes
from harness.planned import plan_with
from harness.record import Check, Row, at_most, holds
from questions.published import PUBLISHED, ROUNDING

TITLE = "Published graphs, from 90 % of the keep-all peak to the floor (auto: captured order; auto_free: any order)"
CASES = (*PUBLISHED, "vgg16_b256_train", "unet_b32_train", "mobilenet_b512_train")
QUICK = ("fcn8_b32_train",)
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
MOST_SECONDS = 2.0  # at 90 % and 80 %


def rows(name: str, quick: bool) -> Iterator[Row]:
    program = published(name)
    if program is None:
        yield Row("graphs", {"case": name, "planner": ABSENT})
        return
    peak, (floor, _) = unplanned_bytes(program), floor_bytes(program)
    plan_with("auto", program, int(0.95 * peak))  # numba compiles, HiGHS loads
    smallest, schedule = smallest_schedule(program)
    budgets = {f"{share:.0%}": int(share * peak) for share in SHARES if share * peak > smallest}
    budgets["smallest"] = smallest
    for label, budget in budgets.items():
        for planner in ("auto", "auto_free"):
            seeds = (schedule,) if label == "smallest" else ()
            planned = plan_with(planner, program, budget, seeds=seeds)
            percent = None if planned.overhead is None else 100 * planned.overhead
            bound = None if planned.answer.bound is None else 100 * planned.answer.bound
            best = _best_published(name, label, free=planner == "auto_free")
            checks: list[Check] = [holds("legal and within budget", planned.legal)]
            if best is not None:
                checks.append(at_most("best published", float("inf") if percent is None else percent, best + ROUNDING))
            if label in ("90%", "80%"):
                checks.append(at_most("seconds", planned.cpu_seconds, MOST_SECONDS))
            yield Row(
                "graphs",
                {
                    "case": name,
                    "ops": len(program.ops),
                    "budget": label,
                    "of_floor": budget / floor,
                    "planner": planner,
                    "added_percent": percent,
                    "bound_percent": bound,
                    "status": planned.answer.status.name,
                    "published": best,
                    "cpu_seconds": planned.cpu_seconds,
                },
                tuple(checks),
            )


def _best_published(name: str, label: str, *, free: bool) -> float | None:
    """The least published percentage in the class of orders; in free order those of captured order count as well."""
    figures = PUBLISHED.get(name, {}).get(int(label[:-1]) if label.endswith("%") else 0)
    if figures is None:
        return None
    known = [value for value in (figures if free else figures[:2]) if value is not None]
    return min(known, default=None)
