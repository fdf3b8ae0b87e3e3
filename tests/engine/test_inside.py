"""With the optimizer in the step: who may look at gradients, what is refused by name, and what a failure leaves."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbflow
from ebbflow.errors import BudgetError, CaptureError, PlanMismatch, UpdateError, UsageError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).square().mean()


Pair = tuple[Net, torch.optim.Optimizer]


def fitted(**options: Any) -> Pair:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ebbflow.fit(model, "100%", optimizer=optimizer, step="inside", progress=None, **options)
    return model, optimizer


@pytest.fixture
def pair() -> Pair:
    return fitted()


def batch(seed: int = 0) -> Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))


def step(pair: Pair, seed: int = 0) -> float:
    model, optimizer = pair
    optimizer.zero_grad()
    loss = model(batch(seed))
    loss.backward()
    optimizer.step()
    return loss.item()


def weights(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def eager(steps: int = 0) -> Pair:
    """A twin that nobody has fitted, after some steps."""
    torch.manual_seed(0)
    model = Net()
    pair = model, torch.optim.AdamW(model.parameters(), lr=0.01)
    for seed in range(steps):
        step(pair, seed)
    return pair


# -- who looks at gradients -----------------------------------------------------------------------------------


READERS: dict[str, Callable[[Net, torch.optim.Optimizer], Any]] = {
    "clip_grad_norm_": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_value_": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "a log": lambda model, _: [each.grad for each in model.parameters()],
    "a comprehension": lambda model, _: sum(each.grad is not None for each in model.parameters()),
    "getattr": lambda model, _: getattr(model.first.weight, "grad"),  # noqa: B009
    "set": lambda model, _: setattr(model.first.weight, "grad", torch.ones(8, 6)),
}


@pytest.mark.parametrize("reader", READERS)
def test_who_reads_a_gradient_before_the_optimizer_steps_is_told(pair: Pair, reader: str) -> None:
    model, optimizer = pair
    model(batch()).backward()
    with pytest.raises(UsageError, match=r"before optimizer\.step\(\)|cleared"):
        READERS[reader](model, optimizer)
    optimizer.step()  # which goes on as ever
    optimizer.zero_grad()
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("clear", ["optimizer", "model", "by hand"])
def test_an_update_cannot_be_left_out_any_more(pair: Pair, clear: str) -> None:
    model, optimizer = pair
    model(batch()).backward()
    with pytest.raises(UsageError, match="this update cannot be left out any more"):
        _clear(clear, model, optimizer)


def _clear(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if how == "by hand":
        for each in model.parameters():
            each.grad = None
    else:
        {"optimizer": optimizer, "model": model}[how].zero_grad()


@pytest.mark.parametrize("clear", ["optimizer", "model", "by hand"])
def test_gradients_are_cleared_as_ever(pair: Pair, clear: str) -> None:
    model, optimizer = pair
    for seed in range(3):
        model(batch(seed)).backward()
        optimizer.step()
        _clear(clear, model, optimizer)
        assert all(type(each) is nn.Parameter and each.grad is None for each in model.parameters())
    assert equal(weights(model), weights(eager(3)[0]))


def test_who_reads_a_gradient_after_the_step_is_told_that_it_is_gone(pair: Pair) -> None:
    model, _ = pair
    step(pair)
    with pytest.raises(UsageError, match="is gone"):
        _ = model.first.weight.grad
    with pytest.raises(UsageError, match="set_to_none=False"):
        model.zero_grad(set_to_none=False)


def test_clearing_between_forward_and_backward_is_as_good(pair: Pair) -> None:
    model, optimizer = pair
    for seed in range(3):
        loss = model(batch(seed))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert equal(weights(model), weights(eager(3)[0]))
    assert ebbflow.calls_of(model).planned == 3


def test_gradients_that_are_never_cleared_are_refused(pair: Pair) -> None:
    """Eager adds to them."""
    model, optimizer = pair
    model(batch()).backward()
    optimizer.step()
    before = weights(model)
    with pytest.raises(UsageError, match="have not been cleared"):
        model(batch()).backward()
    assert equal(weights(model), before)


def test_a_backward_without_a_step_between_is_refused(pair: Pair) -> None:
    model, _ = pair
    model(batch()).backward()
    before = weights(model)
    with pytest.raises(UsageError, match=r"ebbflow\.no_update\(model\)"):
        model(batch()).backward()
    assert equal(weights(model), before)


def test_a_closure_steps_once(pair: Pair) -> None:
    model, optimizer = pair

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch(number))
        loss.backward()
        return loss

    for number in range(3):  # noqa: B007 - the closure reads it
        optimizer.step(closure)  # type: ignore[arg-type]
    assert equal(weights(model), weights(eager(3)[0]))


# -- what a parameter is meanwhile ----------------------------------------------------------------------------


def test_models_are_copied_and_saved_between_backward_and_step(pair: Pair) -> None:
    model, optimizer = pair
    model(batch()).backward()
    assert all(isinstance(each, nn.Parameter) and each.requires_grad for each in model.parameters())
    assert repr(model.first.weight).startswith("Parameter containing")
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again) is Net
        assert all(type(each) is nn.Parameter and each.grad is None for each in again.parameters())
        assert equal(weights(again), weights(model))
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    assert equal(list(torch.load(saved).values()), weights(model))
    assert [id(each) for each in model.parameters()] == [id(p) for g in optimizer.param_groups for p in g["params"]]
    with torch.no_grad():
        model(batch())
    optimizer.step()


def test_a_run_is_saved_and_taken_up_again() -> None:
    whole = fitted()
    for seed in range(4):
        step(whole, seed)
    first = fitted()
    for seed in range(2):
        step(first, seed)
    kept = copy.deepcopy((first[0].state_dict(), first[1].state_dict()))
    second = fitted()
    second[0].load_state_dict(kept[0])
    second[1].load_state_dict(kept[1])
    for seed in range(2, 4):
        step(second, seed)
    assert equal(weights(second[0]), weights(whole[0]))
    assert str(second[1].state_dict()) == str(whole[1].state_dict())


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


def test_a_gradient_from_elsewhere_is_refused_at_the_step(pair: Pair) -> None:
    model, optimizer = pair
    loss = model(batch())
    twin, plain = eager()
    (twin(batch()) + twin.first.weight.square().sum()).backward()
    plain.step()
    (loss + model.first.weight.square().sum()).backward()
    added = False
    try:
        optimizer.step()
        added = True  # it came before the step's own
    except UpdateError as error:
        said = str(error)
    assert equal(weights(model), weights(twin)) if added else "first.weight got gradients from outside" in said


# -- accumulation ---------------------------------------------------------------------------------------------


def test_gradients_are_accumulated_where_that_is_said(pair: Pair) -> None:
    model, optimizer = pair
    twin, plain = eager()
    for seed in range(4):
        for net, stepping, within in ((model, optimizer, ebbflow.no_update), (twin, plain, None)):
            stepping.zero_grad()
            for micro in range(3):
                if micro < 2 and within is not None:
                    with within(net):
                        net(batch(10 * seed + micro)).backward()
                    assert net.first.weight.grad is not None
                else:
                    net(batch(10 * seed + micro)).backward()
            stepping.step()
    assert equal(weights(model), weights(twin))
    assert str(optimizer.state_dict()) == str(plain.state_dict())


def test_no_update_is_nothing_where_the_optimizer_is_outside() -> None:
    model = Net()
    ebbflow.fit(model, "100%", progress=None)
    with ebbflow.no_update(model):
        model(batch()).backward()
    assert model.first.weight.grad is not None
    with pytest.raises(UsageError, match="not fitted"):
        ebbflow.no_update(Net())


# -- refused by name ------------------------------------------------------------------------------------------


def test_what_needs_gradients_or_weights_as_they_are_is_refused(pair: Pair) -> None:
    model, _ = pair
    before = weights(model)
    loss = model(batch())
    with pytest.raises(CaptureError, match="retain_graph"):
        loss.backward(retain_graph=True)
    del loss
    one = model(batch(1))
    with pytest.warns(UserWarning, match="in flight"):
        two = model(batch(2))
    with pytest.raises(CaptureError, match="another forward of this model is in flight"):
        one.backward()
    del one, two
    with pytest.raises(CaptureError, match=r"torch\.autograd\.grad"):
        torch.autograd.grad(model(batch()), list(model.parameters()))
    with (
        pytest.raises(CaptureError, match="checkpoint or saved-tensor hooks"),
        torch.autograd.graph.save_on_cpu(),
    ):
        model(batch())
    handle = model.first.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(CaptureError, match=r"first\.weight has a hook"):
        model(batch())
    handle.remove()
    assert equal(weights(model), before)
    step(pair)


def test_a_backward_for_some_inputs_updates_those(pair: Pair) -> None:
    model, optimizer = pair
    twin, plain = eager()
    for net, stepping in ((model, optimizer), (twin, plain)):
        net(batch()).backward(inputs=[net.last.weight])
        stepping.step()
    assert equal(weights(model), weights(twin))


def test_state_that_comes_later_stands_behind_the_rest_in_order() -> None:
    def order(*, planned: bool) -> list[int]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if planned:
            ebbflow.fit(model, "100%", optimizer=optimizer, step="inside", progress=None)
        model.first.requires_grad_(False)
        for seed in range(3):
            step((model, optimizer), seed)
            optimizer.zero_grad()
            model.first.requires_grad_(True)
        return list(optimizer.state_dict()["state"])

    assert order(planned=True) == order(planned=False) == [2, 3, 0, 1]


class Own(torch.optim.SGD):
    """Written where its hook is."""


@pytest.mark.parametrize("kind", [Own, torch.optim.SGD])
def test_a_hook_before_the_step_is_never_shown_none(kind: type[torch.optim.SGD]) -> None:
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1)
    ebbflow.fit(model, "100%", optimizer=optimizer, step="inside", progress=None)

    def clamp(stepping: torch.optim.Optimizer, *_: object) -> None:
        for each in stepping.param_groups[0]["params"]:
            if each.grad is not None:
                each.grad.clamp_(-1e-4, 1e-4)

    optimizer.register_step_pre_hook(clamp)
    model(batch()).backward()
    with pytest.raises(UsageError, match=r"is read before optimizer\.step\(\)"):
        optimizer.step()


class Coupled(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        for each in parameters:
            each.sub_(0.1 * each.grad / norm)


class Clips(torch.optim.Optimizer):
    """Clips by the norm of all gradients itself, by a most that it keeps in an attribute."""

    def __init__(self, parameters: Any, most: float | None = None) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.most = most

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        if self.most is not None and parameters:
            torch.nn.utils.clip_grad_norm_(parameters, self.most)
        for each in parameters:
            each.sub_(0.1 * each.grad)


class FirstRate(torch.optim.SGD):
    """Steps every group by the rate of the first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(self.param_groups[0]["lr"] * each.grad)


class CountsInTensor(FirstRate):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.steps = {"taken": torch.zeros(())}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps["taken"] += 1
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(group["lr"] * each.grad)


class Wants(torch.optim.SGD):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: FirstRate(p, lr=0.1), "gives other bits than all together"),
        (CountsInTensor, "counts in its attributes"),
        (lambda p: Wants(p, 0.1), "needs a default in its __init__"),
        *(((lambda p, most=most: Clips(p, most)), "gives other bits than all together") for most in (1e-5, 1.0, 50.0)),
        (torch.optim.LBFGS, "LBFGS takes one step for all of its parameters"),
        (Coupled, "gives other bits than all together"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "differentiable=True"),
    ],
)
def test_an_optimizer_that_is_not_of_single_parameters_is_refused(make: Callable[[Any], Any], why: str) -> None:
    model = Net()
    with pytest.raises(UsageError, match=why) as caught:
        ebbflow.fit(model, "100%", optimizer=make(model.parameters()), step="inside")
    assert "fit(model, budget, optimizer=optimizer)" in str(caught.value)
    with pytest.raises(UsageError, match=why):
        ebbflow.plan(model, (batch(),), budget="100%", optimizer=make(model.parameters()), step="inside")


def test_options_in_attributes_are_those_of_the_updates() -> None:
    (model, clips), (twin, plain) = ((net, Clips(net.parameters())) for net in (Net(), Net()))
    twin.load_state_dict(model.state_dict())
    ebbflow.fit(model, "100%", optimizer=clips, step="inside", progress=None)
    for seed in range(2):
        step((model, clips), seed)
        step((twin, plain), seed)
    assert equal(weights(model), weights(twin))


def test_options_that_do_not_go_together_are_refused() -> None:
    model = Net()
    with pytest.raises(UsageError, match="no optimizer is given"):
        ebbflow.fit(model, "100%", step="inside")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="not accepted together"):
        ebbflow.fit(
            model, "100%", optimizer=optimizer, step="inside", offload_optimizer=True, tiers="disk", progress=None
        )
    with pytest.raises(UsageError, match="did you mean 'inside'"):
        ebbflow.fit(model, "100%", optimizer=optimizer, step="insid")  # type: ignore[arg-type]


# -- failures -------------------------------------------------------------------------------------------------


class _Explodes(torch.autograd.Function):
    """Raises in its backward when it is told to."""

    armed = False


def test_a_failure_says_what_has_been_updated(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = pair
    step(pair)
    optimizer.zero_grad()
    before = dict(zip((name for name, _ in model.named_parameters()), weights(model), strict=True))
    done: list[int] = []
    from ebbflow.engine import inside

    original = inside.step_alone

    def failing(*args: Any) -> None:
        if len(done) == 2:
            raise MemoryError("no room")
        original(*args)
        done.append(1)

    monkeypatch.setattr(inside, "step_alone", failing)
    with pytest.raises(UpdateError, match="no room") as caught:
        model(batch()).backward()
    changed = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
    assert changed < set(caught.value.updated)
    assert len(changed) == 2
    monkeypatch.undo()
    optimizer.step()  # this step ends as it is
    optimizer.zero_grad()
    step(pair)


def test_ctrl_c_says_it_too(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbflow.engine import inside

    model, _ = pair
    done: list[int] = []
    original = inside.step_alone

    def failing(*args: Any) -> None:
        original(*args)
        done.append(1)
        if len(done) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(inside, "step_alone", failing)
    with pytest.raises(KeyboardInterrupt) as caught:
        model(batch()).backward()
    assert any("had updated" in note for note in caught.value.__notes__)


def test_verification_comes_before_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that comes back with other bits is found in the rehearsal."""
    from ebbflow.errors import VerificationError
    from ebbflow.lower.fingerprints import Fingerprints

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x).square().mean()

    loss, x = Loss(), torch.randn(256, 32)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    smallest = ebbflow.plan(loss, (x,), budget="100%", optimizer=optimizer, step="inside", progress=None).smallest_bytes
    ebbflow.fit(loss, int(1.02 * smallest), optimizer=optimizer, step="inside", progress=None)
    before, random = weights(loss), torch.get_rng_state()

    def wrong(self: Fingerprints, buffer: int, tensor: Tensor) -> None:
        raise VerificationError("other bits", buffer="x", op="y")

    monkeypatch.setattr(Fingerprints, "check", wrong)
    with pytest.raises(VerificationError):
        loss(x)
    assert equal(weights(loss), before)
    assert torch.equal(torch.get_rng_state(), random)


# -- plans ----------------------------------------------------------------------------------------------------


def test_a_plan_is_saved_read_and_run(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plan = ebbflow.plan(model, (batch(),), budget="100%", optimizer=optimizer, step="inside", progress=None)
    plan.save(tmp_path / "plan.json")
    again = ebbflow.Plan.load(tmp_path / "plan.json")
    assert again.program == plan.program
    with pytest.raises(PlanMismatch, match='step="inside"'):
        ebbflow.fit(model, again, optimizer=optimizer, progress=None)(batch())
    ebbflow.unfit(model)
    ebbflow.fit(model, again, optimizer=optimizer, step="inside", progress=None)
    for seed in range(3):
        step((model, optimizer), seed)
    assert equal(weights(model), weights(eager(3)[0]))


def test_another_optimizer_takes_over(pair: Pair) -> None:
    model, _ = pair
    step(pair)
    model.zero_grad()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    ebbflow.set_optimizer(model, other)
    twin, _ = eager(1)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for seed in range(2):
        step((model, other), seed)
        step((twin, plain), seed)
    assert equal(weights(model), weights(twin))


def test_unfit_ends_it(pair: Pair) -> None:
    model, optimizer = pair
    model(batch()).backward()
    ebbflow.unfit(model)
    assert all(type(each) is nn.Parameter for each in model.parameters())
    step((model, optimizer), 1)
    assert model.first.weight.grad is not None


def test_every_step_is_proven_on_request() -> None:
    pair = fitted(verify="always")
    for seed in range(3):
        step(pair, seed)
    assert equal(weights(pair[0]), weights(eager(3)[0]))


def test_nothing_is_proven_on_request() -> None:
    pair = fitted(verify=False)
    for seed in range(3):
        step(pair, seed)
    assert equal(weights(pair[0]), weights(eager(3)[0]))


# -- the rehearsal ------------------------------------------------------------------------------------------------


def test_a_rehearsal_frees_what_the_forward_has_saved_after_its_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest activation is of the last layer, and is gone when the first one's gradient comes."""
    width = 37
    alive: list[int] = []

    def update(self: object, position: int, gradient: Tensor) -> None:
        alive.append(sum(type(each) is Tensor and each.shape == (16, width) for each in gc.get_objects()))

    monkeypatch.setattr("ebbflow.engine.executor._Dropping.update", update)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, width), nn.Sigmoid(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ebbflow.fit(model, "100%", optimizer=optimizer, step="inside", gradients="all", progress=None)
    model(batch())
    assert len(alive) == 6
    assert alive[0] > 0
    assert alive[-1] == 0


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


@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_gradients_of_a_round_that_only_sums_are_clipped(kind: float) -> None:
    """As at the end of an epoch whose last round is not whole."""
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    optimizer, plain = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, twin))
    clipping = ebbflow.Clipping(0.01, norm_type=kind)
    ebbflow.fit(model, "100%", optimizer=optimizer, step="inside", max_norm=clipping, progress=None)
    for rounds in ((True, False), (True, True), (False,)):
        for seed, only_sums in enumerate(rounds):
            with ebbflow.no_update(model) if only_sums else contextlib.nullcontext():
                model(batch(seed)).backward()
            twin(batch(seed)).backward()
        total = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01, norm_type=kind)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
        assert torch.equal(ebbflow.total_norm(model), total)
        assert equal(weights(model), weights(twin))


@pytest.mark.parametrize("sums_all", [False, True])
def test_a_closure_makes_its_gradients_before_they_are_clipped(sums_all: bool) -> None:
    """As Lightning's trainer steps: the last backward of a round is called by the step itself."""
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    ebbflow.fit(model, "100%", optimizer=optimizer, step="inside", max_norm=0.01, progress=None)

    def closure() -> Tensor:
        with ebbflow.no_update(model) if sums_all else contextlib.nullcontext():
            loss = model(batch(1))
        loss.backward()
        return loss.detach()

    for _ in range(3):
        with ebbflow.no_update(model):
            model(batch(0)).backward()
        optimizer.step(closure)
        for seed in (0, 1):
            twin(batch(seed)).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
        plain.step()
        for each in (optimizer, plain):
            each.zero_grad()
        assert equal(weights(model), weights(twin))


def test_state_stands_in_order_where_some_gradients_only_came_while_summing() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
            return sum(self.parts[each](x).square().mean() for each in used)  # type: ignore[return-value]

    def order(*, planned: bool) -> list[int]:
        model = Parts()
        optimizer = torch.optim.AdamW(model.parameters())
        if planned:
            ebbflow.fit(model, "100%", optimizer=optimizer, step="inside", progress=None)
        with ebbflow.no_update(model) if planned else contextlib.nullcontext():
            model(batch(), (0, 1, 2)).backward()
        model(batch(), (0, 2)).backward()
        optimizer.step()
        return list(optimizer.state_dict()["state"])

    assert order(planned=True) == order(planned=False)


# -- between the backward and the step ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), {"momentum": 0.9}),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"nesterov": True}),
        (lambda p: torch.optim.Adam(p), {"weight_decay": 0.1}),
        (lambda p: torch.optim.AdamW(p), {"maximize": True}),
    ],
)
def test_options_that_take_more_are_planned_for(make: Callable[[Any], Any], changed: dict[str, Any]) -> None:
    """A plan whose updates were priced without them holds no more; eager's bits go on."""
    torch.manual_seed(0)
    model = Net()
    eager = copy.deepcopy(model)
    optimizer, other = make(model.parameters()), make(eager.parameters())
    ebbflow.fit(model, "100%", optimizer=optimizer, step="inside", progress=None)
    plans: list[object] = []
    for number in range(4):
        for each in (optimizer, other):
            for group in each.param_groups:
                group.update(changed if number >= 2 else {})
                group["lr"] = 0.0 if number == 0 else 0.1  # a schedule's beginning asks for no other plan
        for each, trained in ((optimizer, model), (other, eager)):
            trained(batch(number)).backward()
            each.step()
            each.zero_grad()
        plans.append(ebbflow.plan_of(model))
        assert all(map(torch.equal, weights(model), weights(eager)))
    assert plans[0] is plans[1]
    assert plans[2] is not plans[1]
    assert plans[3] is plans[2]


class _AllAtOnce(torch.optim.SGD):
    """Its kernel for lists wants at least one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [each for each in group["params"] if each.grad is not None]
            torch._foreach_add_(given, [each.grad for each in given], alpha=-group["lr"])


class _Counting(torch.optim.SGD):
    """Counts its steps beside its state, and acts on that late."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad, alpha=group["lr"] if self.count < 100 else 0.0)


@pytest.mark.parametrize(
    ("kind", "why"), [(_AllAtOnce, "fails where no parameter has a gradient"), (_Counting, "counts in its attributes")]
)
def test_what_one_by_one_is_not_is_found_out(kind: type[torch.optim.SGD], why: str) -> None:
    model = Net()
    with pytest.raises(UsageError, match=why):
        ebbflow.fit(model, "100%", optimizer=kind(model.parameters(), lr=0.1), step="inside")


def test_parameters_in_the_same_memory_are_refused_and_parts_of_one_are_not() -> None:
    model = Net()
    whole = torch.zeros(64)
    model.first.weight.data = whole[:48].view(8, 6)
    model.last.weight.data = whole[48:].view(2, 8)
    ebbflow.fit(model, "100%", optimizer=torch.optim.AdamW(model.parameters()), step="inside", progress=None)
    ebbflow.unfit(model)
    model.last.weight.data = whole[40:56].view(2, 8)
    with pytest.raises(UsageError, match="two parameters lie in the same memory"):
        ebbflow.fit(model, "100%", optimizer=torch.optim.AdamW(model.parameters()), step="inside")


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_state_to_come_is_in_the_budget_of_every_micro_batch(where: Any) -> None:
    """A budget without room for it beside summed gradients is refused before the first optimizer step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    before = weights(model)
    optimizer = torch.optim.AdamW(model.parameters())
    ebbflow.fit(model, 10_000, optimizer=optimizer, step=where, progress=None)
    x = torch.randn(8, 256)
    with pytest.raises(BudgetError) as refused:
        model(x).square().mean().backward()
    assert refused.value.smallest_bytes is not None
    ebbflow.set_budget(model, refused.value.smallest_bytes + 2**12)

    def micro_batches() -> None:
        with ebbflow.no_update(model):
            for _ in range(3):
                model(x).square().mean().backward()

    with pytest.raises(BudgetError) as later:
        micro_batches()
    assert all(map(torch.equal, before, weights(model))), "no weight has changed"
    assert later.value.smallest_bytes is not None
    if where == "inside":
        return  # the step that updates is another one, and is refused for itself, before it does
    model.zero_grad()
    ebbflow.set_budget(model, later.value.smallest_bytes + 2**12)
    for _ in range(2):
        with ebbflow.no_update(model):
            model(x).square().mean().backward()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
