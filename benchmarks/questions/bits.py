"""Same bits, within budget, as predicted: whole steps compared on a grid of budgets and thread counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import ebbflow
from ebbflow.zoo import GPTConfig, gpt, mlp_chain
from harness.grid import captured
from harness.record import Row, at_most, holds

TITLE = "Bits, budget and prediction (planned step against captured order and eager)"
SHARES = (0.6, 0.4, 0.2)
NEAR_SMALLEST = 1.02
PREDICTION_TARGET = 0.001  # DESIGN 7: the gate on bytes above the start, on CPU


def _gpt(dropout: float, tied: bool) -> Callable[[], ebbflow.Case]:
    config = GPTConfig(vocabulary=512, length=64, layers=3, width=64, heads=4, dropout=dropout, tied=tied)
    return lambda: gpt(4, config)


CASES: dict[str, Callable[[], ebbflow.Case]] = {
    "mlp_chain": lambda: mlp_chain(256, layers=12, width=64),
    "mlp_chain dropout 0.1": lambda: mlp_chain(256, layers=12, width=64, dropout=0.1),
    "gpt tied": _gpt(0.0, True),
    "gpt untied": _gpt(0.0, False),
    "gpt tied dropout 0.1": _gpt(0.1, True),
    "gpt untied dropout 0.1": _gpt(0.1, False),
}
QUICK = ("mlp_chain dropout 0.1", "gpt tied dropout 0.1")


def rows(name: str, quick: bool) -> Iterator[Row]:
    """Every budget at one and two threads."""
    for threads in (1,) if quick else (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        case = CASES[name]()
        known = captured(case)
        budgets = {f"{share:.0%}": known.grid_bytes(share) for share in ((0.4,) if quick else SHARES)}
        budgets[f"{NEAR_SMALLEST:g} x smallest"] = int(NEAR_SMALLEST * known.smallest_above_bytes)
        for label, above in budgets.items():
            plan = known.plan(above)
            yield _row(name, threads, label, plan, ebbflow.verify(case.model, case.args, case.kwargs, plan))


def _row(name: str, threads: int, label: str, plan: ebbflow.Plan, seen: ebbflow.Verification) -> Row:
    return Row(
        "bits",
        {
            "case": name,
            "threads": threads,
            "budget": label,
            "unplanned_bytes": seen.baseline_above_bytes,
            "budget_bytes": seen.budget_above_bytes,
            "predicted_bytes": seen.predicted_above_bytes,
            "measured_bytes": seen.measured_above_bytes,
            "equal_to_captured": seen.equal,
            "equal_to_eager": not seen.eager_differences,
            "predicted_overhead": plan.overhead,
        },
        (
            holds("bit-equal", seen.equal),
            holds("within budget", seen.within_budget),
            at_most("prediction error", abs(seen.prediction_error), PREDICTION_TARGET),
        ),
    )
