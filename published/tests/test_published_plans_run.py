"""Published planners' plans run: the captured step's bits, within the budget, as predicted."""

from __future__ import annotations

import contextlib

import pytest
import torch

import ebbtide
from ebbtide._api.verify import Verifier
from ebbtide.zoo import mlp_chain

# Those with plans of a form of their own; what the others return are reruns in captured order, like greedy's.
PLANNERS = ("chain", "revolve", "min_cut", "linearized_greedy")


def budgets(case: ebbtide.Case) -> list[int]:
    """From tight to ample."""
    top = ebbtide.plan(case.model, case.args, budget="1000%", options=ebbtide.Options(planner="keep_all", effort=50))
    return [int(share * top.predicted_peak_bytes) for share in (0.6, 0.7, 0.8, 0.9, 1.1)]


@pytest.fixture(scope="module")
def case() -> ebbtide.Case:
    torch.manual_seed(0)
    return mlp_chain(128, layers=8)


@pytest.fixture(scope="module")
def verifier(case: ebbtide.Case) -> Verifier:
    return Verifier(case.model, case.args, case.kwargs)


@pytest.mark.parametrize("planner", PLANNERS)
def test_plans_run(planner: str, case: ebbtide.Case, verifier: Verifier) -> None:
    for budget in budgets(case):
        with contextlib.suppress(ebbtide.errors.BudgetError):
            plan = ebbtide.plan(
                case.model, case.args, budget=budget, options=ebbtide.Options(planner=planner, effort=500)
            )
            break
    assert len(plan.schedule.computes) > len(plan.program.ops) + 1, "nothing runs again: nothing is tested"
    found = verifier.check(plan)
    assert found.differences == ()
    assert found.within_budget
    assert abs(found.prediction_error) <= 0.001
