"""The published rows of the Checkmate authors' and Moccasin's graphs at 90 % and 80 % of the keep-all peak."""

from __future__ import annotations

from collections.abc import Iterator

from ebbtide.planners import missing_package, planner_names
from harness.graphs import ABSENT, published, unplanned_bytes
from harness.planned import plan_with
from harness.record import Row, at_most, holds

TITLE = "Published graphs at 90 % and 80 % of the keep-all peak, added time in percent"
# Published percentages by (graph, share): Checkmate's MILP, Moccasin with C = 2, FastSA, which may reorder
# (Moccasin, ICML 2023; FastSA, NeurIPS 2023, Table 1). None: not given, or no plan in time.
PUBLISHED: dict[str, dict[int, tuple[float | None, float | None, float | None]]] = {
    "random_layered_n100": {90: (0.8, 0.8, 0.0), 80: (2.3, 2.3, 0.3)},
    "random_layered_n250": {90: (0.9, 0.9, 0.0), 80: (None, 4.9, 0.0)},
    "fcn8_b32_train": {90: (0.0, 0.0, 0.1), 80: (0.1, 0.1, 0.1)},
    "resnet50_b256_train": {90: (0.1, 0.2, 0.2), 80: (0.3, 0.3, 0.4)},
}
CASES = tuple(PUBLISHED)
QUICK = ("fcn8_b32_train",)
LIMIT_SECONDS = 60.0
ROUNDING = 0.05  # published figures have one digit
FREE_ORDER = ("anneal", "auto_free")  # which may beat what is proven for captured order
LEFT_OUT = ("checkmate_free", "checkmate_lp_pure", "keep_all", "least_memory")  # same optimum; in the notes; no plans


def rows(name: str, quick: bool) -> Iterator[Row]:
    program = published(name)
    if program is None:
        yield Row("published", {"case": name, "planner": ABSENT})
        return
    peak = unplanned_bytes(program)
    for share, (checkmate, moccasin, fastsa) in PUBLISHED[name].items():
        known = [value for value in (checkmate, moccasin) if value is not None]
        for planner in planner_names():
            if planner in LEFT_OUT or missing_package(planner):
                continue
            if quick and planner not in ("auto", "greedy", "checkmate"):
                continue
            planned = plan_with(planner, program, share * peak // 100, limit_seconds=LIMIT_SECONDS)
            percent = None if planned.overhead is None else 100 * planned.overhead
            checks = [holds("legal and within budget", planned.legal)]
            if known and planner == "auto":
                value = float("inf") if percent is None else percent
                checks.append(at_most("best published in captured order", value, min(known) + ROUNDING))
            if fastsa is not None and planner in FREE_ORDER:
                value = float("inf") if percent is None else percent
                checks.append(at_most("FastSA", value, fastsa + ROUNDING))
            yield Row(
                "published",
                {
                    "case": name,
                    "budget": f"{share}%",
                    "planner": planner,
                    "status": planned.answer.status.name,
                    "added_percent": percent,
                    "bound_percent": None if planned.answer.bound is None else 100 * planned.answer.bound,
                    "bound_class": planned.answer.bound_class,
                    "Checkmate": checkmate,
                    "Moccasin": moccasin,
                    "FastSA": fastsa,
                    "seconds": planned.seconds,
                    "pure_rounding": planned.answer.notes.get("pure overhead"),
                },
                tuple(checks),
            )
