"""The scenarios of ``tests/gpu`` on CPU, so that they are known to work before a card is there."""

from __future__ import annotations

import pytest
import torch

import ebbtide
from device_steps import Way, case_of, compared, deterministic
from ebbtide.step.unplanned import unplanned_schedule


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("chain", Way(scaler=True)),
        ("gpt", Way(autocast=torch.bfloat16)),
        ("images", Way()),
    ],
    ids=["chain, scaled", "gpt, autocast", "images"],
)
def test_training_is_eagers(name: str, way: Way) -> None:
    case = case_of(name, "cpu", large=False)
    with deterministic():
        eager, fitted, budget = compared(case, way)
    assert fitted.same_as(eager)
    plan = ebbtide.plan_of(case.model)
    assert plan is not None
    assert plan.predicted_peak_bytes <= budget
    assert plan.schedule != unplanned_schedule(plan.program), "nothing is recomputed: the budget tests nothing"
