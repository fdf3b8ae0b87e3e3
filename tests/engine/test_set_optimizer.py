"""An optimizer that is made after ``fit``: its state counts from the next call on, and nothing is captured again."""

from __future__ import annotations

import pytest
import torch

import ebbflow
from ebbflow.errors import UsageError
from ebbflow.zoo import MLPChain, mlp_chain


def chain() -> tuple[MLPChain, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    case = mlp_chain(256, layers=6, width=64)
    assert isinstance(case.model, MLPChain)
    return case.model, case.args


def train(model: torch.nn.Module, args: tuple[torch.Tensor, ...], optimizer: torch.optim.Optimizer) -> None:
    model(*args).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_its_state_counts_before_its_first_step() -> None:
    model, args = chain()
    ebbflow.fit(model, "60%", progress=None)
    model(*args).backward()
    model.zero_grad()
    before = ebbflow.plan_of(model)
    adam = torch.optim.Adam(model.parameters())
    step = ebbflow.step_of(model)
    assert ebbflow.set_optimizer(model, adam) is model
    train(model, args, adam)
    after = ebbflow.plan_of(model)
    assert before is not None
    assert after is not None
    assert ebbflow.step_of(model) is step, "the step that is known"
    weights = sum(each.nbytes for each in model.parameters())
    moments = 2 * weights + 4 * len(list(model.parameters()))
    assert after.resident_bytes - before.resident_bytes == moments
    train(model, args, adam)
    assert ebbflow.plan_of(model) is after or ebbflow.plan_of(model) == after


def test_the_training_is_that_of_a_model_that_was_told_at_once() -> None:
    def trained(*, late: bool) -> list[torch.Tensor]:
        model, args = chain()
        adam = torch.optim.Adam(model.parameters())
        ebbflow.fit(model, "1GiB", optimizer=None if late else adam, progress=None)
        if late:
            ebbflow.set_optimizer(model, adam)
        for _ in range(3):
            train(model, args, adam)
        plan = ebbflow.plan_of(model)
        assert plan is not None
        return [torch.tensor(plan.resident_bytes), *(each.detach() for each in model.parameters())]

    for late, early in zip(trained(late=True), trained(late=False), strict=True):
        assert torch.equal(late, early)


def test_the_state_that_moves_is_the_new_ones() -> None:
    model, args = chain()
    first, second = (torch.optim.Adam(model.parameters()) for _ in range(2))
    ebbflow.fit(model, "1GiB", optimizer=first, tiers="disk", offload_optimizer=True, progress=None)
    for _ in range(2):
        train(model, args, first)
    ebbflow.set_optimizer(model, second)
    kept = [value.clone() for state in first.state.values() for value in state.values()]
    for _ in range(2):
        train(model, args, second)
    model(*args)
    again = [value for state in first.state.values() for value in state.values()]
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))
    step = ebbflow.step_of(model)
    assert step is not None
    assert step.optimizer_traffic is not None
    ebbflow.unfit(model)


def test_what_is_no_optimizer_of_the_model_is_refused() -> None:
    model, _ = chain()
    with pytest.raises(UsageError, match="not fitted"):
        ebbflow.set_optimizer(model, torch.optim.SGD(model.parameters()))
    ebbflow.fit(model, "1GiB")
    with pytest.raises(UsageError, match=r"takes the optimizer that trains the model .* not function"):
        ebbflow.set_optimizer(model, lambda each: each)  # type: ignore[arg-type]
    other, _ = chain()
    with pytest.raises(UsageError, match="holds no parameter of this MLPChain"):
        ebbflow.set_optimizer(model, torch.optim.SGD(other.parameters()))
