"""At every budget a planned step is the captured step is the eager step, within its budget and as predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ebbtide

MODELS = [
    "mlp_chain",
    "mlp_chain with dropout",
    "gpt",
    "gpt with dropout",
    "gpt untied",
    "gpt untied with dropout",
]
DEPTHS = ["f60", "f20", "smallest"]
# Threads decide how kernels split their work and draw; which ops there are beside that is all the same to them.
TWO_THREADS = ["mlp_chain with dropout", "gpt with dropout"]
CASES = [*((model, depth, 1) for model in MODELS for depth in DEPTHS), *((model, "f20", 2) for model in TWO_THREADS)]

# Autograd's own root gradient is allocated outside the captured graphs: a scalar, 0.1 % of nothing this small.
SLACK_BYTES = 64


def as_predicted(result: ebbtide.Verification) -> bool:
    off = abs(result.predicted_above_bytes - result.measured_above_bytes)
    return off <= max(SLACK_BYTES, 0.001 * result.measured_above_bytes)


@pytest.mark.parametrize(("model", "depth", "threads"), CASES)
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
