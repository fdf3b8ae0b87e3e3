"""Forty sequence lengths in random order under one budget: what each new one costs, and what sharing plans wastes."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch

import ebbtide
from ebbtide._api.fit import step_of
from ebbtide.planners.search.smallest import forget_smallest
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.step.provenance import Planned
from ebbtide.zoo import GPTConfig, gpt
from ebbtide.zoo.hf import hf_t5
from harness.record import Row, at_most, holds

TITLE = "Shapes that change: forty lengths in random order, budgets as shares of the longest one's unplanned peak"
CASES = ("gpt 60%", "gpt 40%", "hf_t5 60%")
QUICK = ("gpt 60%",)
COUNT, QUICK_COUNT = 40, 7
MOST_SEARCHES = 8
MEAN_WASTE, WORST_WASTE = 0.005, 0.01  # of the unplanned step's time, against the plan that a search finds


@dataclass(frozen=True)
class _Subject:
    """A model and its call at a length, from the shortest to the longest."""

    model: torch.nn.Module
    call: Callable[[int], tuple[tuple[Any, ...], Mapping[str, Any]]]
    shortest: int
    longest: int


def rows(name: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    kind, share = name.split()
    torch.manual_seed(0)
    subject = _SUBJECTS[kind]()
    lengths = list(range(subject.shortest, subject.longest + 1))
    random.Random(0).shuffle(lengths)
    lengths = lengths[: QUICK_COUNT if quick else COUNT]
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = directory  # platformdirs' place on Linux
        budget = _budget(subject, float(share.rstrip("%")) / 100)
        found = _train(subject, lengths, budget)
    yield Row(
        "buckets",
        {"case": name, "budget_bytes": budget, **found},
        (
            at_most("searches", found["searches"], MOST_SEARCHES),
            at_most("mean waste", found["mean_waste"], MEAN_WASTE),
            at_most("worst waste", found["worst_waste"], WORST_WASTE),
            holds("every step within the budget, measured", found["within"]),
        ),
    )


def _gpt() -> _Subject:
    case = gpt(4, GPTConfig(vocabulary=512, length=256, layers=6, width=128, heads=4, dropout=0.1))
    tokens, targets = case.args
    return _Subject(case.model, lambda n: ((tokens[:, :n].contiguous(), targets[:, :n].contiguous()), {}), 64, 256)


def _t5() -> _Subject:
    case = hf_t5(4, vocabulary=512, length=96, layers=4, width=128, heads=4)
    arguments = case.kwargs or {}
    return _Subject(
        case.model, lambda n: ((), {key: each[:, :n].contiguous() for key, each in arguments.items()}), 32, 96
    )


_SUBJECTS = {"gpt": _gpt, "hf_t5": _t5}


def _budget(subject: _Subject, share: float) -> int:
    """A share of the longest call's unplanned peak."""
    args, kwargs = subject.call(subject.longest)
    plan = ebbtide.plan(subject.model, args, kwargs, budget="1000%", options=ebbtide.Options(planner="keep_all"))
    return round(share * plan.baseline_peak_bytes)


def _train(subject: _Subject, lengths: list[int], budget: int) -> dict[str, Any]:
    """Two steps at each length, the second measured by Ebbtide itself; then every plan held against an own search."""
    model = ebbtide.fit(subject.model, budget)
    plans: list[ebbtide.Plan] = []
    within = True
    first_seconds: list[float] = []
    for length in lengths:
        args, kwargs = subject.call(length)
        for turn in range(2):
            begin = time.perf_counter()
            outputs = model(*args, **kwargs)
            if turn == 0:
                first_seconds.append(time.perf_counter() - begin)
            (outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]).backward()
            model.zero_grad()
        step = step_of(model)
        assert step is not None
        assert step.plan is not None
        assert step.measured_above_bytes is not None
        within &= step.plan.resident_bytes + step.measured_above_bytes <= budget
        plans.append(step.plan)
    anew = [_anew(plan) for plan in plans]
    planned = [index for index, plan in enumerate(plans) if plan.baseline_peak_bytes > budget]
    waste = [plans[index].overhead - anew[index].overhead for index in planned]
    # The first capture of a process compiles planners and imports what capture needs: it is shown by itself.
    return {
        "shapes": len(lengths),
        "recomputing": len(planned),
        "searches": sum(plan.provenance.planned is not Planned.ADAPTED for plan in plans),
        "symbolic_capture_call_seconds": max(first_seconds[1:], default=0.0),
        "shared_capture_call_seconds": mean(sorted(first_seconds[1:])[:-1] or [0.0]),
        "of_it_planning_seconds": mean(plan.plan_seconds for plan in plans[1:]),
        "planned_anew_seconds": mean(plan.plan_seconds for plan in anew[1:]),
        "mean_overhead": mean(plans[index].overhead for index in planned) if planned else 0.0,
        "mean_waste": mean(waste) if waste else 0.0,
        "worst_waste": max(waste, default=0.0),
        "within": within,
    }


def _anew(plan: ebbtide.Plan) -> ebbtide.Plan:
    """The plan that a search finds for the same program and budget, as a process that knows nothing would."""
    forget_smallest()
    return make_plan(
        plan.program,
        ebbtide.Budget(bytes=plan.budget_bytes),
        resident_bytes=plan.resident_bytes,
        reserve_bytes=plan.reserve_bytes,
        options=PlanningOptions(),
    )
