"""Any legal schedule executes exactly, also those that no planner would choose."""

from __future__ import annotations

from typing import Any

import pytest
from test_budgets import as_predicted

import ebbtide
from ebbtide.step import legality
from random_schedule import random_schedule, with_schedule


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in (3, 4))])
@pytest.mark.parametrize("model", ["mlp_chain with dropout", "gpt with dropout"])
def test_random_schedule_is_the_same_step(study: Any, model: str, seed: int) -> None:
    subject = study(model)
    program = subject.unplanned.program
    schedule = random_schedule(program, seed, drop=0.02 + 0.01 * seed)
    assert legality.check(program, schedule) == []
    plan = with_schedule(subject.unplanned, schedule)
    result = ebbtide.verify(subject.case.model, subject.case.args, subject.case.kwargs, plan)
    assert result.differences == ()
    assert result.eager_differences == ()
    assert as_predicted(result), (result.predicted_above_bytes, result.measured_above_bytes)


def test_random_schedules_repeat_before_and_after_the_boundary_and_replay_random_ops(study: Any) -> None:
    program = study("gpt with dropout").unplanned.program
    early = late = replays = 0
    for seed in range(6):
        order = random_schedule(program, seed, drop=0.02 + 0.01 * seed).computes
        boundary = order.index(None)
        early += boundary - program.boundary
        late += len(order) - 1 - boundary - (len(program.ops) - program.boundary)
        replays += sum(1 for op in order if op is not None and program.ops[op].random)
        replays -= sum(1 for op in program.ops if op.random)
    assert early > 5
    assert late > 50
    assert replays > 5


def test_a_random_schedule_passes_the_dynamic_proof(study: Any) -> None:
    subject = study("gpt with dropout")
    plan = with_schedule(subject.unplanned, random_schedule(subject.unplanned.program, 3, drop=0.03))
    model = ebbtide.fit(subject.case.model, plan)
    try:
        model(*subject.case.args).backward()
        step = ebbtide.step_of(model)
        assert step is not None
        assert step.verified_buffers > 0
    finally:
        ebbtide.unfit(model)
        model.zero_grad()
