"""A plan whose first runs leave captured order runs: the captured step's bits, as predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ebbtide
from ebbtide._api.verify import Verifier
from ebbtide.step import legality
from ebbtide.step.schedule import Schedule
from ebbtide.zoo import mlp_chain


@pytest.fixture(scope="module")
def case() -> ebbtide.Case:
    torch.manual_seed(0)
    return mlp_chain(128, layers=8)


@pytest.fixture(scope="module")
def verifier(case: ebbtide.Case) -> Verifier:
    return Verifier(case.model, case.args, case.kwargs)


def test_first_runs_in_another_order_run_too(case: ebbtide.Case, verifier: Verifier) -> None:
    plan = ebbtide.plan(case.model, case.args, budget="1000%", options=ebbtide.Options(planner="keep_all", effort=50))
    program = plan.program
    order = list(plan.schedule.computes)
    swapped: list[int] = []
    for at in range(len(order) - 1):
        here, following = order[at], order[at + 1]
        if here is None or following is None or here in swapped:
            continue
        if not set(program.ops[here].outputs) & set(program.ops[following].inputs):
            order[at], order[at + 1] = following, here
            swapped.append(here)
    schedule = Schedule.from_computes(program, order)
    assert len(swapped) > 3
    assert not legality.check(program, schedule)
    found = verifier.check(replace(plan, schedule=schedule))
    assert found.differences == ()
    assert abs(found.prediction_error) <= 0.001
