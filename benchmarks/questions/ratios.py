"""Cost over the optimum's, as in Checkmate's Table 2: the geometric mean over budgets where the optimum is proven."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ebbtide.planners.search.smallest import smallest_schedule
from harness.graphs import published, unplanned_bytes
from harness.layer_graphs import NETWORKS
from harness.planned import plan_with
from harness.record import Row, at_most

TITLE = "Cost over the proven optimum's, geometric mean over budgets (Checkmate, Table 2)"
GRAPHS = {"vgg16": "vgg16_b256_train", "unet": "unet_b32_train", "mobilenet": "mobilenet_b512_train"}
GRAPHS |= {"resnet50": "resnet50_b256_train", "fcn8": "fcn8_b32_train"}
CASES = tuple(NETWORKS)
QUICK = ("vgg16",)
SHARES = (0.8, 0.6, 0.4, 0.2)  # of the way from the smallest found to the unplanned
LIMIT_SECONDS = 30.0
PROVERS = ("auto", "checkmate")  # the second only where the first has no proof
PLANNERS = ("chen_sqrt", "chen_greedy", "ap_sqrt", "ap_greedy", "linearized_sqrt", "linearized_greedy")
PLANNERS += ("revolve", "per_block", "min_cut", "checkmate_lp", "greedy", "chain", "anneal")
# AP sqrt(n), AP greedy, Griewank's log n, two-phase LP rounding: the paper's Table 2.
PAPER = {
    "mobilenet": {"ap_sqrt": 1.14, "ap_greedy": 1.07, "revolve": 7.07, "checkmate_lp": 1.06},
    "vgg16": {"ap_sqrt": 1.28, "ap_greedy": 1.06, "revolve": 1.44, "checkmate_lp": 1.01},
    "vgg19": {"ap_sqrt": 1.54, "ap_greedy": 1.39, "revolve": 1.75, "checkmate_lp": 1.00},
    "unet": {"ap_sqrt": 1.27, "ap_greedy": 1.23, "checkmate_lp": 1.03},
    "resnet50": {"ap_sqrt": 1.20, "ap_greedy": 1.25, "checkmate_lp": 1.05},
}
TARGETS = {"checkmate_lp": 1.06, "greedy": 1.05, "chain": 1.05, "anneal": 1.05, "best": 1.01}
PROVEN = 1e-5  # between a bound and a plan's overhead


def rows(name: str, quick: bool) -> Iterator[Row]:
    program = published(GRAPHS.get(name, "")) or NETWORKS[name]().program(32)
    costs = "profile, published" if published(GRAPHS.get(name, "")) else "FLOPs"
    peak = unplanned_bytes(program)
    smallest, _ = smallest_schedule(program)
    ratios: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    proven = 0
    for share in SHARES[:2] if quick else SHARES:
        budget = int(smallest + share * (peak - smallest))
        found = {}
        for planner in (*PLANNERS, *PROVERS):
            if planner == "checkmate" and found["auto"].proven:
                continue
            found[planner] = plan_with(planner, program, budget, limit_seconds=LIMIT_SECONDS)
            seconds[planner] = max(seconds.get(planner, 0.0), found[planner].seconds)
        bounds = [found[p].answer.bound for p in PROVERS if p in found and found[p].answer.bound is not None]
        in_order = [f.overhead for p, f in found.items() if f.overhead is not None and p != "anneal"]
        if not bounds or min(in_order) > max(bounds) + PROVEN:
            continue  # the optimum of this budget is not proven
        proven += 1
        optimum = 1.0 + min(in_order)
        for planner, planned in found.items():
            if planned.overhead is not None:
                ratios.setdefault(planner, []).append((1.0 + planned.overhead) / optimum)
            pure = planned.answer.notes.get("pure overhead", "none")
            if planner == "checkmate_lp" and not pure.startswith("none"):
                ratios.setdefault("checkmate_lp, pure", []).append((1.0 + float(pure)) / optimum)
        contenders = [found[p].overhead for p in ("greedy", "chain", "anneal") if p in found]
        best = min((1.0 + o for o in contenders if o is not None), default=None)
        if best is not None:
            ratios.setdefault("best", []).append(best / optimum)
    for planner, values in sorted(ratios.items()):
        mean = math.exp(sum(map(math.log, values)) / len(values))
        checks = (at_most("ratio", mean, TARGETS[planner]),) if planner in TARGETS else ()
        yield Row(
            "ratios",
            {
                "case": name,
                "costs": costs,
                "planner": planner,
                "budgets_proven": proven,
                "budgets_with_a_plan": len(values),
                "ratio": mean,
                "paper": PAPER.get(name, {}).get(planner),
                "most_seconds": seconds.get(planner),
            },
            checks,
        )
