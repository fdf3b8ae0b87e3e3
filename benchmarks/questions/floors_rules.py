"""What do rules that write results over what dies add to heads in slices: smallest budget, overhead, bits, bytes?

Each model of the zoo is planned as it was captured, with heads in slices, and with results written over what dies
besides. f-budgets are those of the captured step: its smallest plus f of what its unplanned peak is above that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import ebbflow
from ebbflow.errors import BudgetError
from ebbflow.zoo.small import SMALL
from harness.record import Row, at_most, holds

TITLE = "Zoo at small size: smallest budget and overhead with rewrite rules and without"
CASES = (
    "gpt",
    "hf_gpt2",
    "hf_bert",
    "hf_t5",
    "llama_70b_lora",
    "transformer_base",
    "dcgan",
    "unet",
    "segnet",
    "resnet50",
    "mobilenet",
    "mlp_chain",
)
QUICK = ("dcgan",)
WAYS: dict[str, Any] = {"captured": "none", "heads": None, "all": "in-place"}
F = (0.5, 0.1)
EFFORT = 1000  # local-search moves: what is asked here is what rules change, not the quality of plans
_ENOUGH = 0.02
"""Overhead by which a plan may be slower than that of the captured step: costs of other ops are measured anew."""


def rows(case: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = SMALL[case]()
    call = (made.model, made.args, made.kwargs)
    smallest = {way: _smallest(call, option) for way, option in WAYS.items()}
    unplanned = ebbflow.plan(*call, budget="200%", rewrites="none", progress=None).baseline_peak_bytes
    lowered = {f"smallest, {way}, of captured": smallest[way] / smallest["captured"] for way in ("heads", "all")}
    yield Row(
        "rules",
        {"case": case, "smallest, captured, bytes": smallest["captured"], "unplanned, bytes": unplanned, **lowered},
        (at_most("smallest with all rules / captured", lowered["smallest, all, of captured"], 1.0),),
    )
    for f in F[:1] if quick else F:
        budget = int(smallest["captured"] + f * (unplanned - smallest["captured"]))
        yield _within(case, call, f, budget)


def _smallest(call: tuple[Any, ...], rewrites: Any) -> int:
    try:
        plan = ebbflow.plan(*call, budget=1, rewrites=rewrites, effort=EFFORT, progress=None)
    except BudgetError as error:
        return error.smallest_bytes or 0
    raise AssertionError(f"a budget of one byte has a plan: {plan}")


def _within(case: str, call: tuple[Any, ...], f: float, budget: int) -> Row:
    columns: dict[str, Any] = {"case": case, "f": f}
    plans = {
        way: ebbflow.plan(*call, budget=budget, rewrites=option, effort=EFFORT, progress=None)
        for way, option in WAYS.items()
    }
    for way, plan in plans.items():
        columns[f"overhead, {way}"] = plan.overhead
    rewrites = () if plans["all"].rewritten is None else plans["all"].rewritten.rewrites
    columns["rules"] = ", ".join(dict.fromkeys(f"{each.rule} {each.form}" for each in rewrites)) or "none"
    columns["places"] = sum(dict(each.settings).get("places", 1) for each in rewrites)
    found = ebbflow.verify(*call, plans["all"])
    columns["measured / predicted"] = found.measured_above_bytes / found.predicted_above_bytes
    added = plans["all"].overhead - plans["captured"].overhead
    checks = (
        holds("bits of the captured step", not found.differences),
        at_most("measured / predicted", columns["measured / predicted"], 1.001),
        at_most("overhead with all rules - captured", added, _ENOUGH),
    )
    return Row("rules", columns, checks)
