"""What the executor adds: captured keep-all against eager, and planned against unplanned beside the prediction."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import ebbtide
from harness import path_models as peers
from harness.grid import captured
from harness.measuring import above_bytes, interleaved, step
from harness.record import Row, at_most

TITLE = "Executor: CPU seconds of generated graphs, one thread, all methods interleaved"
CASES = ("gpt-24L-d128-b8", "gpt-12L-d512-v4096")
QUICK = ()
SHARES = (0.6, 0.4)
ROUNDS = 7
MOST_KEEP_ALL = 1.08
MOST_PREDICTION_ERROR = 0.03  # points of overhead


def rows(name: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    args = peers.build(name).args
    known = captured(peers.build(name))
    plans = {"keep all": known.keep_all}
    plans.update({f"{share:.0%}": known.plan(known.grid_bytes(share)) for share in SHARES})
    methods = {"eager": peers.eager(name)}
    methods.update({label: _fitted(name, plan) for label, plan in plans.items()})
    peaks = {label: above_bytes(m.model, m.run, args) for label, m in methods.items()}
    times = interleaved({label: (m.model, m.run) for label, m in methods.items()}, args, ROUNDS)
    unplanned = times["keep all"]
    for label, seen in times.items():
        plan = plans.get(label)
        measured = seen.best_ratio(unplanned) - 1
        columns = {
            "case": name,
            "method": label,
            "peak_bytes": peaks[label],
            "cpu_seconds_best": seen.best,
            "over_eager_best": seen.best_ratio(times["eager"]),
            "over_eager_median": seen.median_ratio(times["eager"]),
            "predicted_seconds": None if plan is None else plan.step_seconds,
        }
        checks = ()
        if label == "keep all":
            checks = (at_most("of eager's CPU time", seen.best_ratio(times["eager"]), MOST_KEEP_ALL),)
        elif plan is not None:
            columns |= {
                "predicted_overhead": plan.overhead,
                "overhead_best": measured,
                "overhead_median": seen.median_ratio(unplanned) - 1,
            }
            checks = (at_most("|measured - predicted|", abs(measured - plan.overhead), MOST_PREDICTION_ERROR),)
        yield Row("executor", columns, checks)


def _fitted(name: str, plan: ebbtide.Plan) -> peers.Method:
    """The model under ``plan``, its first (proven) and second (measured) step behind it."""
    case = peers.build(name)
    ebbtide.fit(case.model, plan)
    for _ in range(2):
        step(case.model, case.args)
        case.model.zero_grad()
    return peers.Method(case.model, case.model)
