"""With the optimizer in the step: what its updates have used, and somebody changes before ``optimizer.step()`` ends."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ebbtide
from ebbtide.errors import UpdateError, UsageError
from engine.pairs import Descent, Net, Pair, batch, eager, equal, fitted, inside, step, weights, with_twin


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
    with pytest.raises(UpdateError, match=r"state of .* changed between loss.backward\(\) and"):
        optimizer.step()


def test_looking_at_state_and_counting_in_attributes_changes_nothing() -> None:
    model = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.taken = 0
    inside(model, optimizer)
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
    inside(model, optimizer)
    model(batch()).backward()
    if where == "a group":
        optimizer.param_groups[0]["lr"] = 0.2
    elif where == "an attribute":
        optimizer.scale = 2.0
    else:
        optimizer.param_groups[0]["more"]["k"] = 2.0
    name = {"a group": "lr", "an attribute": "scale"}.get(where, "more")
    with pytest.raises(UpdateError, match=rf"{name} of the optimizer changed between loss.backward\(\)") as caught:
        optimizer.step()
    assert set(caught.value.updated) == {name for name, _ in model.named_parameters()}


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
        ebbtide.set_optimizer(model, other)
    optimizer.step()
    optimizer.zero_grad()
    ebbtide.set_optimizer(model, other)
    step((model, other))


@pytest.mark.parametrize("unfitted", [False, True])
def test_a_backward_of_a_forward_with_another_optimizer_updates_nothing(pair: Pair, unfitted: bool) -> None:
    model, optimizer = pair
    step(pair)
    optimizer.zero_grad()
    loss, before = model(batch()), weights(model)
    other: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if unfitted:
        ebbtide.unfit(model)
    else:
        ebbtide.set_optimizer(model, other)
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
    with pytest.raises(UpdateError, match=r"changed between loss.backward\(\) and.*Change weights"):
        optimizer.step()


def test_weights_may_be_written_after_the_step_and_before_the_forward(pair: Pair) -> None:
    twin = eager(0)
    for seed in range(3):
        for each in (pair, twin):
            step(each, seed)
            _decay(*each)
    assert equal(weights(pair[0]), weights(twin[0]))


# -- closures ---------------------------------------------------------------------------------------------------


def _clips(model: Net, _: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def _halves_gradients(model: Net, _: torch.optim.Optimizer) -> None:
    for each in model.parameters():
        if each.grad is not None:
            each.grad.mul_(0.5)


def _halves_the_rate(_: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def _scales_weights(model: Net, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.first.weight.mul_(0.9)


def _zeroes_averages(_: Net, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


@pytest.mark.parametrize("then", [_clips, _halves_gradients, _halves_the_rate, _scales_weights, _zeroes_averages])
def test_what_a_closure_does_after_its_backward_is_told_of(pair: Pair, then: Callable[..., None]) -> None:
    model, optimizer = pair
    step(pair)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch())
        loss.backward()
        then(model, optimizer)
        return loss

    with pytest.raises((UsageError, UpdateError)):
        optimizer.step(closure)  # type: ignore[arg-type]


def test_a_closure_may_not_clear_what_a_backward_before_it_has_applied(pair: Pair) -> None:
    model, optimizer = pair

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch())
        loss.backward()
        return loss

    closure()
    with pytest.raises(UsageError, match="or cleared, and step"):
        optimizer.step(closure)  # type: ignore[arg-type]


def test_a_closure_that_is_called_twice_is_told_of() -> None:
    class Twice(Descent):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if closure is not None:
                with torch.enable_grad():
                    closure()
                    closure()
            for group in self.param_groups:
                self.of_group(group)

    model = Net()
    optimizer = Twice(model.parameters(), lr=0.1)
    inside(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch())
        loss.backward()
        return loss

    with pytest.raises(UpdateError, match="a second time"):
        optimizer.step(closure)


def test_a_closure_that_does_nothing_steps_what_there_is(pair: Pair) -> None:
    for model, optimizer in (pair, twin := eager()):
        for seed in range(3):
            optimizer.zero_grad()
            loss = model(batch(seed))
            loss.backward()
            optimizer.step(lambda loss=loss: loss.item())
    assert equal(weights(pair[0]), weights(twin[0]))


@pytest.mark.parametrize("where", ["outside of the closure", "inside of it"])
def test_rounds_that_update_and_rounds_that_only_sum_are_clipped_by_turns(where: str) -> None:
    pairs = with_twin(lambda p: torch.optim.SGD(p, lr=0.1), max_norm=0.01)
    (model, _), (twin, _) = pairs
    for number in range(6):
        for each, optimizer in pairs:

            def closure(each: Net = each, optimizer: torch.optim.Optimizer = optimizer, number: int = number) -> Tensor:
                if where == "inside of it":
                    optimizer.zero_grad()
                sums = each is model and number % 2 == 1
                with ebbtide.no_update(model) if sums else contextlib.nullcontext():
                    loss = each(batch(number))
                loss.backward()
                if each is twin:
                    torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01)
                return loss

            if where != "inside of it":
                optimizer.zero_grad()
            optimizer.step(closure)  # type: ignore[arg-type]
    assert equal(weights(model), weights(twin))


def test_other_arguments_of_a_step_are_refused() -> None:
    class Scaled(Descent):
        @torch.no_grad()
        def step(self, closure: Any = None, scale: float | None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                self.of_group({**group, "lr": (scale or 1.0) * group["lr"]})

    model = Net()
    optimizer = Scaled(model.parameters(), lr=0.1)
    inside(model, optimizer)
    model(batch()).backward()
    with pytest.raises(UpdateError, match="more than a closure"):
        optimizer.step(scale=0.5)
    optimizer.step(scale=None)


def test_weights_may_be_written_by_hooks_after_the_step_wherever_they_are_registered() -> None:
    outcomes: list[list[Tensor]] = []
    for first in (True, False, None):  # None: eager
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def clamp(*_: object, model: Net = model) -> None:
            with torch.no_grad():
                for each in model.parameters():
                    each.clamp_(-0.1, 0.1)

        if first:
            optimizer.register_step_post_hook(clamp)
        if first is not None:
            inside(model, optimizer)
        if not first:
            optimizer.register_step_post_hook(clamp)
        for seed in range(3):
            step((model, optimizer), seed)
        outcomes.append(weights(model))
    assert equal(outcomes[0], outcomes[2])
    assert equal(outcomes[1], outcomes[2])


def test_a_penalty_in_a_backward_of_its_own_is_told_of_with_what_has_been_updated(pair: Pair) -> None:
    model, optimizer = pair
    step(pair)
    optimizer.zero_grad()
    model(batch()).backward()
    model.first.weight.square().sum().backward()
    with pytest.raises((UsageError, UpdateError)) as told:
        optimizer.step()
    assert "no weight has been changed" not in str(told.value)
