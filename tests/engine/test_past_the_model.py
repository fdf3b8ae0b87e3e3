"""Training past a fitted model, in phases and beside planned calls, is refused before a weight changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbflow
from ebbflow.engine.fitted_class import FITTED
from ebbflow.errors import UsageError

X = torch.randn(8, 16)


class Net(nn.Module):
    """With parts that a loop may call, and a head that its forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(32, 1)
        self.other = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).square().mean()

    def contrastive(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.body(x)).logsumexp(1).mean()


Loop = Callable[[Net, torch.optim.Optimizer], None]


def _part(model: Net, _: Any) -> None:
    model.contrastive(X).backward()


def _weights(model: Net, _: Any) -> None:
    nn.functional.linear(X, model.body[0].weight).tanh().sum().backward()


def _copied_call(model: Net, _: Any) -> None:
    type(model).__mro__[1].forward(model, X).backward()


def _by_grad(model: Net, _: Any) -> None:
    parameters = list(model.body.parameters())
    for each, gradient in zip(parameters, torch.autograd.grad(model.body(X).sum(), parameters), strict=True):
        each.grad = gradient


def _another_thread(model: Net, _: Any) -> None:
    thread = threading.Thread(target=lambda: model.contrastive(X).backward())
    thread.start()
    thread.join()


def _planned_and_dropped(model: Net, _: Any) -> None:
    """A planned call whose backward never comes makes no gradient."""
    model(X).item()
    model.contrastive(X).backward()


PAST = [_part, _weights, _copied_call, _by_grad, _another_thread, _planned_and_dropped]


def _after(model: Net, _: Any) -> None:
    model(X).backward()
    model.contrastive(X).backward()


def _before(model: Net, _: Any) -> None:
    model.contrastive(X).backward()
    model(X).backward()


def _penalty(model: Net, _: Any) -> None:
    model(X).backward()
    (1e-2 * model.body[0].weight.abs().sum()).backward()


def _a_head_alone(model: Net, _: Any) -> None:
    model(X).backward()
    model.other(torch.ones(2, 32)).sum().backward()


def _among_many(model: Net, _: Any) -> None:
    for _ in range(3):
        model(X).backward()
    model.contrastive(X).backward()
    for _ in range(3):
        model(X).backward()


def _other_thread_between(model: Net, _: Any) -> None:
    model(X).backward()
    _another_thread(model, None)


BESIDES = [_after, _before, _penalty, _a_head_alone, _among_many, _other_thread_between]


def _fitted() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = ebbflow.fit(Net(), "100%", effort=10, progress=None)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _step(model: Net, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    optimizer.zero_grad()
    loop(model, optimizer)
    optimizer.step()


def _refused(model: Net, optimizer: torch.optim.Optimizer, loop: Loop, match: str) -> None:
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(UsageError, match=match):
        _step(model, optimizer, loop)
    with pytest.raises(UsageError, match=match):  # whoever handles the first and goes on
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def _plain(model: Net, _: Any) -> None:
    model(X).backward()


@pytest.mark.parametrize("planned", [0, 1, 4])
@pytest.mark.parametrize("loop", PAST, ids=lambda each: each.__name__)
def test_a_phase_past_the_model_is_refused_whenever_it_comes(loop: Loop, planned: int) -> None:
    model, optimizer = _fitted()
    for _ in range(planned):
        _step(model, optimizer, _plain)
    _refused(model, optimizer, loop, "no planned call has made any")
    _step(model, optimizer, _plain)
    assert ebbflow.calls_of(model).planned >= planned + 1


@pytest.mark.parametrize("loop", BESIDES, ids=lambda each: each.__name__)
def test_a_backward_besides_planned_ones_is_refused_in_the_first_step(loop: Loop) -> None:
    model, optimizer = _fitted()
    _refused(model, optimizer, loop, r"two kinds.*penalty\)\.backward")
    _step(model, optimizer, _plain)


@pytest.mark.parametrize("loop", BESIDES, ids=lambda each: each.__name__)
def test_and_in_the_second_such_step_where_others_came_first(loop: Loop) -> None:
    """Hooks cost, so they are gone while every backward is planned (``engine.arrivals``)."""
    model, optimizer = _fitted()
    for _ in range(3):
        _step(model, optimizer, _plain)
    assert not FITTED[model].arrivals.watches
    _step(model, optimizer, loop)
    _refused(model, optimizer, loop, "two kinds")


def _same_backward(model: Net, _: Any) -> None:
    (model(X) + model.contrastive(X) + 1e-2 * model.body[0].weight.abs().sum()).backward()


def _unused_head(model: Net, _: Any) -> None:
    """Whose gradient comes before the planned backward begins."""
    (model.other(torch.ones(2, 32)).sum() * 2 + model(X)).backward()


def _by_hand(model: Net, _: Any) -> None:
    for each in model.parameters():
        each.grad = torch.ones_like(each)


def _by_hand_besides(model: Net, _: Any) -> None:
    model(X).backward()
    for each in model.parameters():
        each.grad = torch.ones_like(each) if each.grad is None else each.grad * 0.5 + 1


def _saliency(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.contrastive(X.clone().requires_grad_()).backward()
    optimizer.zero_grad()
    model(X).backward()


def _saliency_zeroed(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.contrastive(X).backward()
    optimizer.zero_grad(set_to_none=False)
    model(X).backward()


def _another_model(model: Net, _: Any) -> None:
    other = nn.Linear(16, 1)
    other(X).sum().backward()
    model(X).backward()
    other(X).sum().backward()


def _input_gradient_of_parts(model: Net, _: Any) -> None:
    x = X.clone().requires_grad_()
    torch.autograd.grad(model.body(x).sum(), x)
    model(X).backward()


def _twice(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model(X).backward()
    optimizer.step()


def _twice_scaled(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model(X).backward()
    optimizer.step()
    for each in model.parameters():
        if each.grad is not None:
            each.grad.mul_(0.5)


def _retained(model: Net, _: Any) -> None:
    loss = model(X)
    loss.backward(retain_graph=True)
    loss.backward()


def _accumulated(model: Net, _: Any) -> None:
    for _ in range(5):
        model(X).backward()


def _grad_of_planned(model: Net, _: Any) -> None:
    parameters = [*model.body.parameters(), *model.head.parameters()]
    for each, gradient in zip(parameters, torch.autograd.grad(model(X), parameters), strict=True):
        each.grad = gradient


LEFT_ALONE = [
    _same_backward,
    _unused_head,
    _by_hand_besides,
    _saliency,
    _saliency_zeroed,
    _another_model,
    _input_gradient_of_parts,
    _twice,
    _twice_scaled,
    _retained,
    _accumulated,
    _grad_of_planned,
]


@pytest.mark.parametrize("loop", LEFT_ALONE, ids=lambda each: each.__name__)
def test_what_a_planned_call_has_made_is_left_alone(loop: Loop, recwarn: pytest.WarningsRecorder) -> None:
    model, optimizer = _fitted()
    plain = Net()
    plain.load_state_dict(model.state_dict())
    of_plain = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(4):
        _step(model, optimizer, loop)
        _step(plain, of_plain, loop)
        _step(model, optimizer, _plain)
        _step(plain, of_plain, _plain)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert not ebbflow.calls_of(model).unplanned.keys() - {"optimizer steps on gradients of no planned call"}
    assert not [each for each in recwarn.list if "gradients" in str(each.message)]


@pytest.mark.parametrize("planned", [0, 2])
def test_gradients_written_by_hand_are_counted(planned: int) -> None:
    """No backward has made them, so nothing took a step's memory: evolution strategies, another process's gradients."""
    model, optimizer = _fitted()
    for _ in range(planned):
        _step(model, optimizer, _plain)
    _step(model, optimizer, _by_hand)
    _step(model, optimizer, _by_hand)
    assert ebbflow.calls_of(model).unplanned == {"optimizer steps on gradients of no planned call": 2}


def test_hooks_are_there_only_while_a_backward_was_not_planned() -> None:
    model, optimizer = _fitted()
    arrivals = FITTED[model].arrivals
    _plain(model, None)
    assert arrivals.watches
    optimizer.step()  # the capture was a backward as well
    _step(model, optimizer, _plain)
    assert not arrivals.watches
    _step(model, optimizer, _another_model)
    assert arrivals.watches
    _step(model, optimizer, _plain)
    assert not arrivals.watches
    _step(model, optimizer, _another_model)
    ebbflow.unfit(model)
    assert not arrivals.watches


def test_an_adversary_that_is_not_fitted_is_left_alone() -> None:
    """As in a GAN: the fitted generator's gradients come through the other, whose own backwards are not planned."""
    torch.manual_seed(0)
    generator = ebbflow.fit(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 16)), "100%", effort=10)
    critic = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(each.parameters()) for each in (generator, critic)]
    for _ in range(5):
        noise = torch.randn(8, 4)
        optimizers[1].zero_grad()
        with torch.no_grad():
            fake = generator(noise)
        (critic(fake).mean() - critic(X).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-critic(generator(noise)).mean()).backward()
        optimizers[0].step()
    assert ebbflow.calls_of(generator).planned == 5
    assert list(ebbflow.calls_of(generator).unplanned) == ["no gradients (torch.no_grad or inference_mode)"]


def test_both_of_two_optimizers_judge_their_own_gradients() -> None:
    """One that steps less often than the other sees what came before the other's last step."""
    model, _ = _fitted()
    often = torch.optim.SGD(model.body.parameters(), lr=0.1)
    seldom = torch.optim.SGD([*model.head.parameters(), *model.other.parameters()], lr=0.1)
    model(X).backward()
    model.other(torch.ones(2, 32)).sum().backward()
    often.step()
    often.zero_grad()
    model(X).backward()
    often.step()
    with pytest.raises(UsageError, match="two kinds"):
        seldom.step()


def test_parameters_that_are_changed_by_their_data_take_gradients_of_their_new_shape() -> None:
    """Autograd's leaf knows the shape that a parameter had when it was made, as long as somebody has the leaf."""
    model, optimizer = _fitted()
    _step(model, optimizer, _another_model)
    assert FITTED[model].arrivals.watches
    optimizer.zero_grad()
    model.body[0].weight.data = torch.randn(24, 16)
    model.body[0].bias.data = torch.randn(24)
    model.body[2].weight.data = torch.randn(32, 24)
    _step(model, optimizer, _plain)
    assert model.body[0].weight.grad is not None
    assert model.body[0].weight.grad.shape == (24, 16)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_model_may_be_fitted_where_no_gradients_are(context: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Linear(16, 4))
    with context():
        ebbflow.fit(model, "100%", effort=10, progress=None)
    assert FITTED[model].arrivals.watches
