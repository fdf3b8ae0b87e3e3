"""Planners with settings and planners that need a tier: refused before a capture, and kept with the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ebbtide
from ebbtide.errors import UsageError
from ebbtide.options import Options
from ebbtide.planners.registry import moves_buffers, needs_tiers
from ebbtide.planning.cache import PlanCache
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.report.plan import Plan
from ebbtide.units import Budget
from layered import SIZE, layered, linked


def test_options_refuse_a_planner_that_needs_a_tier_and_has_none() -> None:
    for name in ("capuchin", "libra", "swap", "tflms"):
        assert needs_tiers(name)
        assert moves_buffers(name)
        for asked, said in (
            (
                {},
                "none is given for this machine: give tiers='disk' where the model is on CPU, tiers='host' for a card",
            ),
            ({"machine": "v100-16gb"}, "machine 'v100-16gb' has a link to host: give tiers='host'"),
            ({"machine": dataclasses.replace(linked(1.0), links={})}, "machine 'toy' has no link"),
        ):
            options: dict[str, Any] = asked
            with pytest.raises(UsageError, match=f"planner '{name}' moves buffers and needs a tier.*{said}"):
                Options(planner=name, **options).require_complete()
        Options(planner=name, tiers="host").require_complete()


def test_a_plan_keeps_the_whole_text_and_the_cache_tells_settings_apart(tmp_path: Any) -> None:
    program, card = layered(6), linked(1.0)
    cached = PlanningOptions(machine=card, tiers=("host",), cache=PlanCache(tmp_path))
    plans: list[Plan] = []
    for planner in (f"swap:threshold_bytes={2 * SIZE}", f"swap:threshold_bytes={3 * SIZE}"):
        options = dataclasses.replace(cached, planner=planner)
        plan = make_plan(program, Budget(bytes=100 * SIZE), resident_bytes=0, options=options)
        assert plan.planner == planner
        assert f"by {planner}:" in plan.details
        plans.append(plan)
    assert plans[0].schedule != plans[1].schedule
    path = tmp_path / "plan.json"
    plans[0].save(path)
    assert Plan.load(path).planner == plans[0].planner


def entries() -> dict[str, Callable[..., object]]:
    """Every public function that takes a planner, as calls that never come to a capture."""
    model, batch = torch.nn.Linear(2, 2), (torch.ones(2, 2),)
    return {
        "fit": lambda planner, **given: ebbtide.fit(model, "50%", options=ebbtide.Options(planner=planner, **given)),
        "plan": lambda planner, **given: ebbtide.plan(
            model, batch, budget="50%", options=ebbtide.Options(planner=planner, **given)
        ),
        "sweep": lambda planner, **given: ebbtide.sweep(
            model, batch, budgets=["50%"], planners=[planner], options=ebbtide.Options(**given)
        ),
        "max_batch": lambda planner, **given: ebbtide.max_batch(
            lambda size: pytest.fail(f"made for {size}"),
            budget=2**20,
            options=ebbtide.Options(planner=planner, **given),
        ),
        "doctor": lambda planner, **given: ebbtide.doctor(
            model, batch, options=ebbtide.Options(planner=planner, **given)
        ),
    }


@pytest.mark.parametrize("entry", ["fit", "plan", "sweep", "max_batch", "doctor"])
def test_every_entry_point_refuses_before_it_captures(entry: str) -> None:
    call = entries()[entry]
    with pytest.raises(UsageError, match="planner 'capuchin' moves buffers and needs a tier"):
        call("capuchin")
    with pytest.raises(UsageError, match="lb=5 is more than ub=4; tflms accepts"):
        call("tflms:lb=5,ub=4", tiers="host")
