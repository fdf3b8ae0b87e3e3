"""An optimizer that is made after ``fit``: its state counts from the next call on, and nothing is captured again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import BudgetError, UsageError
from ebbtide.zoo import MLPChain, mlp_chain


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
    ebbtide.fit(model, "60%", progress=None)
    model(*args).backward()
    model.zero_grad()
    before = ebbtide.plan_of(model)
    adam = torch.optim.Adam(model.parameters())
    step = ebbtide.step_of(model)
    assert ebbtide.set_optimizer(model, adam) is model
    train(model, args, adam)
    after = ebbtide.plan_of(model)
    assert before is not None
    assert after is not None
    assert ebbtide.step_of(model) is step, "the step that is known"
    weights = sum(each.nbytes for each in model.parameters())
    moments = 2 * weights + 4 * len(list(model.parameters()))
    assert after.resident_bytes - before.resident_bytes == moments
    train(model, args, adam)
    assert ebbtide.plan_of(model) is after or ebbtide.plan_of(model) == after


def test_the_training_is_that_of_a_model_that_was_told_at_once() -> None:
    def trained(*, late: bool) -> list[torch.Tensor]:
        model, args = chain()
        adam = torch.optim.Adam(model.parameters())
        ebbtide.fit(model, "1GiB", optimizer=None if late else adam, progress=None)
        if late:
            ebbtide.set_optimizer(model, adam)
        for _ in range(3):
            train(model, args, adam)
        plan = ebbtide.plan_of(model)
        assert plan is not None
        return [torch.tensor(plan.resident_bytes), *(each.detach() for each in model.parameters())]

    for late, early in zip(trained(late=True), trained(late=False), strict=True):
        assert torch.equal(late, early)


def test_the_state_that_moves_is_the_new_ones() -> None:
    model, args = chain()
    first, second = (torch.optim.Adam(model.parameters()) for _ in range(2))
    ebbtide.fit(
        model, "1GiB", optimizer=first, tiers="disk", progress=None, options=ebbtide.Options(offload_optimizer=True)
    )
    for _ in range(2):
        train(model, args, first)
    ebbtide.set_optimizer(model, second)
    kept = [value.clone() for state in first.state.values() for value in state.values()]
    for _ in range(2):
        train(model, args, second)
    model(*args)
    again = [value for state in first.state.values() for value in state.values()]
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))
    step = ebbtide.step_of(model)
    assert step is not None
    assert step.optimizer_traffic is not None
    ebbtide.unfit(model)


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_the_state_of_one_that_is_replaced_counts_while_it_is_kept(where: Any) -> None:
    model, args = chain()
    first, second = (torch.optim.Adam(model.parameters()) for _ in range(2))
    ebbtide.fit(model, "1GiB", optimizer=first, step=where, progress=None)
    train(model, args, first)
    ebbtide.set_optimizer(model, second)
    moments = moments_of(model.parameters())
    assert state_of(model, args) == 2 * moments
    del first
    gc.collect()
    assert state_of(model, args) == moments
    ebbtide.unfit(model)


@pytest.mark.parametrize("replaced", [True, False])
def test_another_one_may_not_step_what_the_one_inside_the_step_has_stepped(replaced: bool) -> None:
    """One that was replaced, or that nobody has told of."""
    model, args = chain()
    own, other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(model.parameters())
    first = other if replaced else own
    ebbtide.fit(model, "1GiB", optimizer=first, step="inside", progress=None)
    train(model, args, first)
    ebbtide.set_optimizer(model, own)
    model(*args).backward()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"another optimizer \(Adam\).*set_optimizer"):
            other.step()
    own.step()
    own.zero_grad()
    ebbtide.set_optimizer(model, other)
    train(model, args, other)
    assert other.state


def test_two_models_that_share_weights_have_an_optimizer_each() -> None:
    """Each steps after its own backward, as eager does; both in one round are told of."""

    def trained(*, planned: bool) -> list[torch.Tensor]:
        (one, args), (other, _) = chain(), chain()
        other.load_state_dict(one.state_dict())
        shared = next(iter(one.parameters()))
        name = next(name for name, _ in other.named_parameters())
        holder, _, leaf = name.rpartition(".")
        setattr(other.get_submodule(holder), leaf, shared)
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (one, other)]
        if planned:
            ebbtide.fit(one, "1GiB", optimizer=optimizers[0], step="inside", progress=None)
            ebbtide.fit(other, "1GiB", optimizer=optimizers[1], progress=None)
        for _ in range(3):
            for model, optimizer in zip((one, other), optimizers, strict=True):
                train(model, args, optimizer)
        if planned:
            one(*args).backward()
            with pytest.raises(UsageError, match="if both train these weights, call the step of the model's own first"):
                optimizers[1].step()
            optimizers[0].step()
            optimizers[0].zero_grad()
        else:
            train(one, args, optimizers[0])
        return [each.detach() for each in (*one.parameters(), *other.parameters())]

    for ours, eagers in zip(trained(planned=True), trained(planned=False), strict=True):
        assert torch.equal(ours, eagers)


def test_what_is_no_optimizer_of_the_model_is_refused() -> None:
    model, _ = chain()
    with pytest.raises(UsageError, match="not fitted"):
        ebbtide.set_optimizer(model, torch.optim.SGD(model.parameters()))
    ebbtide.fit(model, "1GiB")
    with pytest.raises(UsageError, match=r"takes the optimizer that trains the model .* not function"):
        ebbtide.set_optimizer(model, lambda each: each)  # type: ignore[arg-type]
    other, _ = chain()
    with pytest.raises(UsageError, match="holds no parameter of this MLPChain"):
        ebbtide.set_optimizer(model, torch.optim.SGD(other.parameters()))


def state_of(model: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> int:
    """Bytes of optimizer state that count at the next call."""
    ebbtide.set_budget(model, "1KiB")
    with pytest.raises(BudgetError) as refused:
        model(*args)
    ebbtide.set_budget(model, "1GiB")
    return refused.value.resident_parts.get("optimizer state", 0)


def moments_of(parameters: Iterable[torch.Tensor]) -> int:
    return sum(2 * each.nbytes + 4 for each in parameters)


def test_one_that_takes_its_place_counts_from_its_first_step_on() -> None:
    model, args = chain()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    ebbtide.fit(model, "1GiB", optimizer=sgd, progress=None)
    train(model, args, sgd)
    adam = torch.optim.Adam(model.parameters())  # nobody tells
    train(model, args, adam)
    assert state_of(model, args) == moments_of(model.parameters())
    del sgd, adam
    assert state_of(model, args) == 0


def test_what_it_has_replaced_counts_while_somebody_has_it() -> None:
    model, args = chain()
    adam = torch.optim.Adam(model.parameters())
    ebbtide.fit(model, "1GiB", optimizer=adam, progress=None)
    train(model, args, adam)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, args, sgd)
    weights = sum(each.nbytes for each in model.parameters())
    assert state_of(model, args) == weights + moments_of(model.parameters())
    gone = weakref.ref(adam)
    del adam
    assert gone() is None, "nobody else keeps its state"
    assert state_of(model, args) == weights


def test_one_for_other_weights_counts_beside_it() -> None:
    model, args = chain()
    first, *others = model.parameters()
    adam, another = torch.optim.Adam([first]), torch.optim.Adam(others)
    ebbtide.fit(model, "1GiB", optimizer=adam, progress=None)
    model(*args).backward()
    for each in (adam, another):
        each.step()
        each.zero_grad()
    assert state_of(model, args) == moments_of(model.parameters())


def test_one_that_holds_the_one_that_was_told_is_no_other() -> None:
    class Outer(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            self.inner.step()

    model, args = chain()
    adam = torch.optim.Adam(model.parameters())
    ebbtide.fit(model, "1GiB", optimizer=adam, step="inside", progress=None)
    outer = Outer(adam)
    train(model, args, outer)
    train(model, args, outer)
    assert adam.state


def test_state_that_leaves_no_room_is_refused_before_the_next_step() -> None:
    model, args = chain()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    ebbtide.fit(model, "1KiB", optimizer=sgd, progress=None)
    with pytest.raises(BudgetError) as refused:
        model(*args)
    ebbtide.set_budget(model, f"{refused.value.smallest_bytes + 1024}B")
    train(model, args, sgd)
    with pytest.warns(UserWarning, match=r"Adam steps weights in the place of SGD.*set_optimizer"):
        train(model, args, torch.optim.Adam(model.parameters()))  # its state goes with it
    train(model, args, adam := torch.optim.Adam(model.parameters()))
    with pytest.raises(BudgetError) as refused:
        model(*args)
    assert refused.value.resident_parts["optimizer state"] == moments_of(model.parameters())
    assert adam.state


def test_where_nobody_told_of_any_its_state_counts_from_its_first_step_on() -> None:
    model, args = chain()
    ebbtide.fit(model, "1GiB", progress=None)
    adam = torch.optim.Adam(model.parameters())
    assert state_of(model, args) == 0
    train(model, args, adam)
    assert state_of(model, args) == moments_of(model.parameters())
    train(model, args, adam)
    assert (plan := ebbtide.plan_of(model)) is not None
    assert "arguments, state of Adam;" in plan.details
    ebbtide.set_budget(model, 1)
    with pytest.raises(BudgetError) as refused:
        model(*args)
    assert any("The state of Adam counts since its first step" in note for note in refused.value.__notes__)
    ebbtide.set_budget(model, "1GiB")
    del adam
    assert state_of(model, args) == 0, "nobody has it any more"


def test_an_optimizer_for_each_weight_that_steps_in_a_hook_counts() -> None:
    """ "Optimizer in backward": nobody could tell of them at once."""
    model, args = chain()
    ebbtide.fit(model, "1GiB", progress=None)
    optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {p: torch.optim.Adam([p]) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        model(*args).backward()
    assert state_of(model, args) == moments_of(model.parameters())


class TwoSteps(torch.optim.Optimizer):
    """Has steps of its own names, as SAM does, and keeps the weights between them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["old"] = each.data.clone()
                each.add_(each.grad)


def test_state_of_an_optimizer_whose_step_nobody_sees_counts() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer, other = TwoSteps(model.parameters()), TwoSteps([nn.Parameter(torch.zeros(3))])
    ebbtide.fit(model, "1GiB", options=ebbtide.Options(effort=10))
    x = torch.randn(8, 64)
    model(x).square().mean().backward()
    first = ebbtide.plan_of(model)
    optimizer.first_step()
    model.zero_grad()
    ebbtide.set_budget(model, "2GiB")
    model(x).square().mean().backward()
    second = ebbtide.plan_of(model)
    assert first is not None
    assert second is not None
    assert second.resident_bytes - first.resident_bytes == sum(each.nbytes for each in model.parameters())
    assert "TwoSteps" in second.details
    assert "TwoSteps" not in first.details
    del other
