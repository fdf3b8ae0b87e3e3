"""With the optimizer in the step: what its updates have used, and somebody changes before ``optimizer.step()`` ends."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ebbflow
from ebbflow.errors import UpdateError, UsageError
from engine.pairs import Net, Pair, batch, eager, equal, fitted, step, weights


@pytest.fixture
def pair() -> Pair:
    return fitted()


def test_schedulers_and_hooks_of_the_optimizer_see_one_step(pair: Pair) -> None:
    model, optimizer = pair
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    twin, plain = eager()
    theirs = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    for seed in range(4):
        step((model, optimizer), seed)
        scheduler.step()
        step((twin, plain), seed)
        theirs.step()
    assert seen == ["before", "after"] * 4
    assert scheduler.get_last_lr() == theirs.get_last_lr()
    assert equal(weights(model), weights(twin))


def test_options_that_change_before_the_step_are_refused(pair: Pair) -> None:
    model, optimizer = pair
    model(batch()).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(UpdateError, match="lr of the optimizer changed") as caught:
        optimizer.step()
    assert set(caught.value.updated) == {name for name, _ in model.named_parameters()}


def _clear_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def _zero_averages(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def _load_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("change", [_clear_state, _zero_averages, _load_state])
def test_state_that_is_changed_before_the_step_is_told_of(
    pair: Pair, change: Callable[[torch.optim.Optimizer], None]
) -> None:
    model, optimizer = pair
    step(pair)
    optimizer.zero_grad()
    change(optimizer)  # here it may be
    step(pair)
    optimizer.zero_grad()
    model(batch()).backward()
    change(optimizer)
    with pytest.raises(UpdateError, match=r"state of .* changed between loss.backward\(\) and optimizer.step"):
        optimizer.step()


def test_looking_at_state_and_counting_in_attributes_changes_nothing() -> None:
    model = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.taken = 0
    ebbflow.fit(model, "100%", optimizer=optimizer, step="inside", progress=None)
    for seed in range(2):
        model(batch(seed)).backward()
        assert not any(optimizer.state[each] for each in model.parameters())  # which makes it
        optimizer.taken += 1
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("where", ["a group", "a dictionary in a group", "an attribute"])
def test_options_that_change_before_the_step_are_told_of(where: str) -> None:
    model = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["more"], optimizer.scale = {"k": 1.0}, 1.0
    ebbflow.fit(model, "100%", optimizer=optimizer, step="inside", progress=None)
    model(batch()).backward()
    if where == "a group":
        optimizer.param_groups[0]["lr"] = 0.2
    elif where == "an attribute":
        optimizer.scale = 2.0
    else:
        optimizer.param_groups[0]["more"]["k"] = 2.0
    with pytest.raises(UpdateError, match=r"of the optimizer changed between loss.backward\(\)"):
        optimizer.step()


def test_a_second_step_after_one_backward_is_told_of(pair: Pair) -> None:
    model, optimizer = pair
    step(pair)
    before = weights(model)
    with pytest.raises(UsageError, match="called again after one backward"):
        optimizer.step()
    assert equal(weights(model), before)
    optimizer.zero_grad()
    step(pair)


def test_another_optimizer_is_refused_before_the_step_of_the_one_that_has_updated(pair: Pair) -> None:
    model, optimizer = pair
    model(batch()).backward()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="its step has not been called"):
        ebbflow.set_optimizer(model, other)
    optimizer.step()
    optimizer.zero_grad()
    ebbflow.set_optimizer(model, other)
    step((model, other))


@pytest.mark.parametrize("unfitted", [False, True])
def test_a_backward_of_a_forward_with_another_optimizer_updates_nothing(pair: Pair, unfitted: bool) -> None:
    model, optimizer = pair
    step(pair)
    optimizer.zero_grad()
    loss, before = model(batch()), weights(model)
    other: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if unfitted:
        ebbflow.unfit(model)
    else:
        ebbflow.set_optimizer(model, other)
    with pytest.raises(UsageError, match="Nothing has been updated; run the forward again"):
        loss.backward()
    del loss
    assert equal(weights(model), before)
    step((model, other))
    other.zero_grad()
    step((model, other))


def _decay(model: Net, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.first.weight.mul_(0.99)


def _load(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})


def _clamp_in_a_hook(model: Net, optimizer: torch.optim.Optimizer) -> None:
    def clamp(*_: object) -> None:
        model.last.weight.detach().clamp_(-0.1, 0.1)

    optimizer.register_step_pre_hook(clamp)


@pytest.mark.parametrize("write", [_decay, _load, _clamp_in_a_hook])
def test_weights_that_are_written_before_the_step_are_told_of(pair: Pair, write: Callable[..., None]) -> None:
    model, optimizer = pair
    step(pair)
    optimizer.zero_grad()
    model(batch()).backward()
    write(model, optimizer)
    with pytest.raises(UpdateError, match=r"were written to between loss.backward\(\) and the end of optimizer.step"):
        optimizer.step()


def test_weights_may_be_written_after_the_step_and_before_the_forward(pair: Pair) -> None:
    twin = eager(0)
    for seed in range(3):
        for each in (pair, twin):
            step(each, seed)
            _decay(*each)
    assert equal(weights(pair[0]), weights(twin[0]))
