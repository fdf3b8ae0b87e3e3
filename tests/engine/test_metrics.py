"""``metrics_of``: numbers by name, as trackers take them."""

from __future__ import annotations

import math

import pytest
import torch

import ebbtide
from ebbtide.errors import UsageError
from ebbtide.zoo import mlp_chain


def test_what_ran_last_and_how_calls_went_are_numbers_by_name() -> None:
    case = mlp_chain(1024, layers=6)
    model = ebbtide.fit(case.model, "75%")
    before = ebbtide.metrics_of(model)
    assert before == {f"ebbtide/{name}": 0.0 for name in ("planned_calls", "unplanned_calls", "shapes", "plans")}
    for _ in range(3):
        model(*case.args).backward()
        model.zero_grad()
    with torch.no_grad():
        model(*case.args)
    found, plan, step = ebbtide.metrics_of(model), ebbtide.plan_of(model), ebbtide.step_of(model)
    assert plan is not None
    assert step is not None
    assert step.measured_above_bytes is not None
    assert all(type(value) is float and math.isfinite(value) for value in found.values())
    assert found["ebbtide/measured_peak_bytes"] == plan.resident_bytes + step.measured_above_bytes
    assert found["ebbtide/measured_peak_bytes"] <= found["ebbtide/budget_bytes"] < found["ebbtide/unplanned_peak_bytes"]
    assert (found["ebbtide/predicted_overhead"], found["ebbtide/bound"]) == (plan.overhead, plan.bound)
    assert (found["ebbtide/planned_calls"], found["ebbtide/shapes"]) == (3.0, 1.0)
    assert found["ebbtide/plans"] >= 1.0


def test_a_plain_model_has_none() -> None:
    with pytest.raises(UsageError, match="not fitted"):
        ebbtide.metrics_of(mlp_chain(4, layers=2).model)
