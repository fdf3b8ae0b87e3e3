"""Training past a fitted model, in phases and beside planned calls, is refused before a weight changes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.engine.fitted_class import FITTED
from ebbtide.errors import UsageError

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
    model = ebbtide.fit(Net(), "100%", progress=None, options=ebbtide.Options(effort=10))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _step(model: Net, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    optimizer.zero_grad()
    loop(model, optimizer)
    optimizer.step()


def _refused(model: Net, optimizer: torch.optim.Optimizer, loop: Loop, match: str) -> None:
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(UsageError, match=match) as refused:
        _step(model, optimizer, loop)
    assert len(str(refused.value).split()) <= 80
    with pytest.raises(UsageError, match=match):  # whoever handles the first and goes on
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def _plain(model: Net, _: Any) -> None:
    model(X).backward()


@pytest.mark.parametrize("planned", [0, 1, 9])
@pytest.mark.parametrize("loop", PAST, ids=lambda each: each.__name__)
def test_a_phase_past_the_model_is_refused_whenever_it_comes(loop: Loop, planned: int) -> None:
    model, optimizer = _fitted()
    for _ in range(planned):
        _step(model, optimizer, _plain)
    _refused(model, optimizer, loop, "no planned call has made any")
    _step(model, optimizer, _plain)
    assert ebbtide.calls_of(model).planned >= planned + 1


@pytest.mark.parametrize("loop", BESIDES, ids=lambda each: each.__name__)
def test_a_backward_besides_planned_ones_is_refused_in_the_first_step(loop: Loop) -> None:
    model, optimizer = _fitted()
    _refused(model, optimizer, loop, r"(?s)penalty\)\.backward.*two kinds")
    _step(model, optimizer, _plain)
    counted = ebbtide.calls_of(model)
    assert counted.unplanned == {"optimizer steps on gradients of no planned call": 2}


@pytest.mark.parametrize("loop", BESIDES, ids=lambda each: each.__name__)
def test_and_in_the_second_such_step_where_others_came_first(loop: Loop) -> None:
    """Hooks cost, so they are gone while every backward is planned (``engine.gradient_watcher``)."""
    model, optimizer = _fitted()
    for _ in range(8):
        _step(model, optimizer, _plain)
    assert not FITTED[model].gradient_watcher.watches
    _step(model, optimizer, loop)
    _refused(model, optimizer, loop, "two kinds")


@pytest.mark.parametrize("steps_before", [True, False])
def test_planned_gradients_that_were_dropped_are_not_told_of(steps_before: bool) -> None:
    """Where another optimizer comes, and where the planned gradients are cleared before another backward."""
    model, optimizer = _fitted()
    model(X).backward()
    if steps_before:
        optimizer.step()
    optimizer.zero_grad()
    model.contrastive(X).backward()
    with pytest.raises(UsageError, match="no planned call has made any") as refused:
        torch.optim.SGD(model.parameters(), 1e-2).step()
    assert len(str(refused.value).split()) <= 80


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
    assert not ebbtide.calls_of(model).unplanned.keys() - {"optimizer steps on gradients of no planned call"}
    assert not [each for each in recwarn.list if "gradients" in str(each.message)]


@pytest.mark.parametrize("planned", [0, 2])
def test_gradients_written_by_hand_are_counted(planned: int) -> None:
    """No backward has made them, so nothing took a step's memory: evolution strategies, another process's gradients."""
    model, optimizer = _fitted()
    for _ in range(planned):
        _step(model, optimizer, _plain)
    _step(model, optimizer, _by_hand)
    _step(model, optimizer, _by_hand)
    assert ebbtide.calls_of(model).unplanned == {"optimizer steps on gradients of no planned call": 2}


def test_hooks_are_there_while_a_backward_was_not_planned_and_for_some_steps_more() -> None:
    model, optimizer = _fitted()
    arrivals = FITTED[model].gradient_watcher
    for steps in (8, 8 * 16):
        for _ in range(steps):
            assert arrivals.watches
            _step(model, optimizer, _plain)
        assert not arrivals.watches
        _step(model, optimizer, _another_model)
    ebbtide.unfit(model)
    assert not arrivals.watches


def test_an_adversary_that_is_not_fitted_is_left_alone() -> None:
    """As in a GAN: the fitted generator's gradients come through the other, whose own backwards are not planned."""
    torch.manual_seed(0)
    generator = ebbtide.fit(
        nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 16)), "100%", options=ebbtide.Options(effort=10)
    )
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
    assert ebbtide.calls_of(generator).planned == 5
    assert list(ebbtide.calls_of(generator).unplanned) == ["no gradients (torch.no_grad or inference_mode)"]


def test_both_of_two_optimizers_judge_their_own_gradients() -> None:
    """One that steps less often than the other sees what came before the other's last step."""
    model, _ = _fitted()
    often = torch.optim.SGD(model.body.parameters(), lr=0.1)
    seldom = torch.optim.SGD([*model.head.parameters(), *model.other.parameters()], lr=0.1)
    model(X).backward()
    model.other(torch.ones(2, 32)).sum().backward()
    for _ in range(20):
        often.step()
        often.zero_grad()
        model(X).backward()
    with pytest.raises(UsageError, match="two kinds"):
        seldom.step()


class Adversaries(nn.Module):
    """Two sides in one model, trained in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.other = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x)).mean()


@pytest.mark.parametrize("toggled", [False, True])
def test_sides_that_are_frozen_in_turns_are_looked_at_all_the_same(toggled: bool) -> None:
    """As Lightning's ``toggle_optimizer`` and pix2pix's ``set_requires_grad`` do."""
    model = ebbtide.fit(Adversaries(), "100%", progress=None, options=ebbtide.Options(effort=10))
    sides = model.one, model.other
    optimizers = [torch.optim.Adam(each.parameters()) for each in sides]
    for _ in range(3):
        for side, optimizer in zip(sides, optimizers, strict=True):
            for each in sides:
                each.requires_grad_(not toggled or each is side)
            optimizer.zero_grad()
            model(X).backward()
            optimizer.step()
    model.requires_grad_(True)
    for _ in range(2):
        optimizers[1].zero_grad()
        model.other(X).square().mean().backward()
        with pytest.raises(UsageError, match="no weight has been changed"):
            optimizers[1].step()
        optimizers[1].zero_grad()
        model(X).backward()
        optimizers[0].step()


def test_parameters_that_an_optimizer_gets_later_are_looked_at() -> None:
    """As a callback that thaws layers does (``add_param_group``); what the optimizer keeps of them counts."""
    model, other = ebbtide.fit(Net(), "100%", progress=None, options=ebbtide.Options(effort=10)), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(other.parameters())
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": list(model.parameters())})
    _step(model, optimizer, _plain)
    assert optimizer in FITTED[model].optimizers.others
    _refused(model, optimizer, _part, "no planned call has made any")


@pytest.mark.parametrize("others", [False, True])
def test_heads_of_a_shared_body_are_trained_in_turns(others: bool) -> None:
    """The gradients that one's planned call has made are planned for the other as well."""

    class Head(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body, self.head = body, nn.Linear(32, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x)).mean()

    torch.manual_seed(0)
    body, unrelated = nn.Sequential(nn.Linear(16, 32), nn.GELU()), nn.Linear(2, 2)
    heads = [ebbtide.fit(Head(body), "100%", progress=None, options=ebbtide.Options(effort=10)) for _ in range(2)]
    optimizer = torch.optim.Adam({each for head in heads for each in head.parameters()})
    for _ in range(6):
        for head in heads:
            optimizer.zero_grad()
            if others:
                unrelated(torch.ones(1, 2)).sum().backward()
            head(X).backward()
            optimizer.step()
    assert [ebbtide.calls_of(head).unplanned for head in heads] == [{}, {}]


@pytest.mark.parametrize("others", [False, True])
def test_a_part_in_the_planned_backward_of_another_model_is_loss_outside(others: bool) -> None:
    encoder = ebbtide.fit(
        nn.Sequential(nn.Linear(16, 16), nn.GELU()), "100%", progress=None, options=ebbtide.Options(effort=10)
    )
    decoder, unrelated = ebbtide.fit(Net(), "100%", progress=None, options=ebbtide.Options(effort=10)), nn.Linear(2, 2)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    for _ in range(3):
        optimizer.zero_grad()
        if others:
            unrelated(torch.ones(1, 2)).sum().backward()
        decoder.contrastive(encoder(X)).backward()
        optimizer.step()
    assert [ebbtide.calls_of(each).unplanned for each in (encoder, decoder)] == [{}, {}]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_penalty_beside_a_checkpointed_call_is_in_its_backward(reentrant: bool) -> None:
    model, optimizer = _fitted()
    x = X.clone().requires_grad_()
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        (loss + 1e-3 * model.body[0].weight.square().sum()).backward()
        optimizer.step()
    assert "optimizer steps on gradients of no planned call" not in ebbtide.calls_of(model).unplanned


def test_new_shapes_are_no_backwards_of_others() -> None:
    """An evolution strategy that looks at losses with gradients on: captures are our own backwards."""
    model, optimizer = _fitted()
    for length in (8, 9, 10):
        model(torch.randn(length, 16)).item()
        _step(model, optimizer, _by_hand)
    assert ebbtide.calls_of(model).unplanned == {"optimizer steps on gradients of no planned call": 3}


@pytest.mark.parametrize("change", [nn.Module.double, lambda each: each.double().float()])
def test_a_model_of_another_type_is_looked_at(change: Callable[[nn.Module], Any]) -> None:
    model, optimizer = _fitted()
    _step(model, optimizer, _another_model)
    change(model)
    x = X.to(model.head.weight.dtype)
    model(x).backward()
    model.contrastive(x).backward()
    with pytest.raises(UsageError, match="two kinds"):
        optimizer.step()


def test_what_was_dropped_is_not_held_against_the_next_gradient() -> None:
    model, optimizer = _fitted()
    model.other(torch.ones(2, 32)).sum().backward()
    model.zero_grad()
    of_body = torch.optim.SGD(model.body.parameters(), lr=0.1)
    for _ in range(10):
        _step(model, of_body, _plain)
    _step(model, optimizer, _unused_head)
    assert ebbtide.calls_of(model).unplanned == {}


def test_no_graph_and_no_parameter_is_kept_by_hooks() -> None:
    model, optimizer = _fitted()
    _step(model, optimizer, _plain)
    del optimizer  # which has the parameters as well
    replaced, graphs = [], []
    for _ in range(2):
        replaced.append(weakref.ref(model.head.weight))
        model.head = nn.Linear(32, 1)
        weights = {name: each * 1.0 for name, each in model.named_parameters()}
        graphs.append(weakref.ref(weights["head.weight"]))
        torch.func.functional_call(model, weights, (X,)).backward()
        del weights
        model(X).backward()
    gc.collect()
    assert [each() for each in (*replaced, *graphs)] == [None] * 4


def test_an_optimizer_that_steps_in_the_backward_is_judged_by_its_whole() -> None:
    """What comes before the planned step begins is in its backward all the same; past the model the next is refused."""
    model = ebbtide.fit(Net(), "100%", progress=None, options=ebbtide.Options(effort=10))
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for each in optimizers:
        each.register_post_accumulate_grad_hook(step)
    for _ in range(12):
        _unused_head(model, None)
    model.contrastive(X).backward()
    with pytest.raises(UsageError, match="no weight has been changed"):
        model.contrastive(X).backward()


@pytest.mark.parametrize("nested", [False, True])
def test_models_that_share_weights_are_not_refused_when_hooks_were_gone(nested: bool) -> None:
    first = ebbtide.fit(Net(), "100%", progress=None, options=ebbtide.Options(effort=10))
    second = Net()
    second.body = (
        ebbtide.fit(first.body, "100%", progress=None, options=ebbtide.Options(effort=10)) if nested else first.body
    )
    if not nested:
        ebbtide.fit(second, "100%", progress=None, options=ebbtide.Options(effort=10))
    pair = first, first.body if nested else second
    optimizer = torch.optim.SGD([*first.parameters(), *second.head.parameters()], lr=0.1)
    for step in range(30):
        optimizer.zero_grad()
        if step in {24, 27}:
            nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        pair[step % 2](X).sum().backward()
        optimizer.step()
    assert [ebbtide.calls_of(each).planned for each in pair] == [15, 15]
    assert [ebbtide.calls_of(each).unplanned for each in pair] == [{}, {}]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, on the way to its compiler
def test_a_compiled_optimizer_is_looked_at_outside_of_its_trace() -> None:
    model, optimizer = _fitted()
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        optimizer.zero_grad()
        _another_model(model, None)
        compiled()
    optimizer.zero_grad()
    _part(model, None)
    with pytest.raises(UsageError, match="no planned call"):
        compiled()


def test_a_part_that_was_wrapped_later_is_named() -> None:
    model = nn.Sequential(ebbtide.fit(nn.Linear(4, 4), "1MiB", progress=None))
    with pytest.raises(UsageError, match=r"what is fitted is 0 in this Sequential.*get_submodule\('0'\)"):
        ebbtide.calls_of(model)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="a compiled call of this torch does not look at shapes again")
def test_parameters_that_are_changed_by_their_data_take_gradients_of_their_new_shape() -> None:
    """Autograd's leaf knows the shape that a parameter had when it was made, as long as somebody has the leaf."""
    model, optimizer = _fitted()
    _step(model, optimizer, _another_model)
    assert FITTED[model].gradient_watcher.watches
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
        ebbtide.fit(model, "100%", progress=None, options=ebbtide.Options(effort=10))
    assert FITTED[model].gradient_watcher.watches
