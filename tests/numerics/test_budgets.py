"""At every budget a planned step is the captured step is the eager step, within its budget and as predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ebbflow

MODELS = [
    "mlp_chain",
    "mlp_chain with dropout",
    "gpt",
    "gpt with dropout",
    "gpt untied",
    "gpt untied with dropout",
]
DEPTHS = [("f60", 1), ("f20", 1), ("smallest", 1), ("f20", 2)]

# Autograd's own root gradient is allocated outside the captured graphs: a scalar, 0.1 % of nothing this small.
SLACK_BYTES = 64


def as_predicted(result: ebbflow.Verification) -> bool:
    off = abs(result.predicted_above_bytes - result.measured_above_bytes)
    return off <= max(SLACK_BYTES, 0.001 * result.measured_above_bytes)


@pytest.mark.parametrize(("depth", "threads"), DEPTHS)
@pytest.mark.parametrize("model", MODELS)
def test_planned_step_is_the_same_step(study: Any, model: str, depth: str, threads: int) -> None:
    torch.set_num_threads(threads)
    subject = study(model, threads)
    plan = subject.just_above_smallest() if depth == "smallest" else subject.at(int(depth[1:]) / 100)
    assert len(plan.schedule.computes) > len(plan.program.ops) + 1, "nothing is recomputed: the budget tests nothing"
    result = subject.check(plan)
    assert result.differences == ()
    assert result.eager_differences == ()
    assert result.within_budget
    assert as_predicted(result), (result.predicted_above_bytes, result.measured_above_bytes)
    assert result.measured_above_bytes < result.baseline_above_bytes
