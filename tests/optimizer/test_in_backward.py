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

import ebbtide
from ebbtide.errors import CaptureError, PlanMismatch, UpdateError, UsageError
from engine.pairs import (
    Net,
    Pair,
    assert_steps_alike,
    batch,
    eager,
    equal,
    fitted,
    inside,
    step,
    weights,
    with_twin,
)


@pytest.fixture
def pair() -> Pair:
    return fitted()


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
        model.first.weight.grad.norm()  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="is gone"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
    assert ebbtide.calls_of(model).planned == 3


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
    with pytest.raises(UsageError, match=r"ebbtide\.no_update\(model\)"):
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


def test_gradients_are_accumulated_where_that_is_said(pair: Pair) -> None:
    model, optimizer = pair
    twin, plain = eager()
    for seed in range(4):
        for net, stepping, within in ((model, optimizer, ebbtide.no_update), (twin, plain, None)):
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
    ebbtide.fit(model, "100%", progress=None)
    with ebbtide.no_update(model):
        model(batch()).backward()
    assert model.first.weight.grad is not None
    with pytest.raises(UsageError, match="not fitted"):
        ebbtide.no_update(Net())


class _Own(torch.optim.Optimizer):
    """Clips by the norm of all where an attribute says so."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "most": 0.0})
        self.clips, self.how = False, {"clips": False}
        self.keeps = self.first = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        own = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        times = 1.0
        if (self.clips or self.how["clips"]) and own:
            times = 1 / (1 + float(torch.stack([each.grad.norm() for each in own]).norm()))
        if self.first:
            times *= self.param_groups[0]["betas"][0]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                if self.keeps:
                    group["most"] = max(group["most"], float(each.grad.abs().max()))
                each.sub_(each.grad, alpha=group["lr"] * times)


@pytest.mark.parametrize(
    ("option", "later"),
    [*((each, False) for each in ("clips", "how", "keeps", "first")), ("clips", True), ("keeps", True)],
)
def test_options_that_couple_parameters_are_found_wherever_they_are(option: str, later: bool) -> None:
    model = Net()
    optimizer = _Own(model.parameters())

    def change() -> None:
        if option == "how":
            optimizer.how["clips"] = True
        else:
            setattr(optimizer, option, True)

    if later:
        inside(model, optimizer)
        model(batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    change()
    before = weights(model)
    with pytest.raises(UsageError, match=r"on stand-ins one by one gives other bits|keeps in its groups"):
        model(batch()) if later else inside(model, optimizer)
    assert equal(weights(model), before)


def test_what_needs_gradients_or_weights_as_they_are_is_refused(pair: Pair) -> None:
    model, _ = pair
    before = weights(model)
    loss = model(batch())
    with pytest.raises(CaptureError, match="retain_graph"):
        loss.backward(retain_graph=True)
    with pytest.raises(CaptureError, match="its forward ran outside of it"), ebbtide.no_update(model):
        loss.backward()
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


def test_options_that_do_not_go_together_are_refused() -> None:
    model = Net()
    with pytest.raises(UsageError, match="no optimizer is given"):
        ebbtide.fit(model, "100%", step="inside")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="not accepted together"):
        ebbtide.fit(
            model,
            "100%",
            optimizer=optimizer,
            step="inside",
            tiers="disk",
            progress=None,
            options=ebbtide.Options(offload_optimizer=True),
        )
    with pytest.raises(UsageError, match="did you mean 'inside'"):
        ebbtide.fit(model, "100%", optimizer=optimizer, step="insid")  # type: ignore[arg-type]


def test_a_failure_says_what_has_been_updated(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = pair
    step(pair)
    optimizer.zero_grad()
    before = dict(zip((name for name, _ in model.named_parameters()), weights(model), strict=True))
    done: list[int] = []
    from ebbtide.optimizer.in_step import backward_updates

    original = backward_updates.step_parameter

    def failing(*args: Any) -> None:
        if len(done) == 2:
            raise MemoryError("no room")
        original(*args)
        done.append(1)

    monkeypatch.setattr(backward_updates, "step_parameter", failing)
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
    from ebbtide.optimizer.in_step import backward_updates

    model, _ = pair
    done: list[int] = []
    original = backward_updates.step_parameter

    def failing(*args: Any) -> None:
        original(*args)
        done.append(1)
        if len(done) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(backward_updates, "step_parameter", failing)
    with pytest.raises(KeyboardInterrupt) as caught:
        model(batch()).backward()
    assert any("had updated" in note for note in caught.value.__notes__)


def test_verification_comes_before_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that comes back with other bits is found in the rehearsal."""
    from ebbtide.errors import VerificationError
    from ebbtide.lower.fingerprints import Fingerprints

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
    smallest = ebbtide.plan(
        loss, (x,), budget="100%", options=ebbtide.Options(optimizer=optimizer, step="inside", progress=None)
    ).smallest_bytes
    ebbtide.fit(loss, int(1.02 * smallest), optimizer=optimizer, step="inside", progress=None)
    before, random = weights(loss), torch.get_rng_state()

    def wrong(self: Fingerprints, buffer: int, tensor: Tensor) -> None:
        raise VerificationError("other bits", buffer="x", op="y")

    monkeypatch.setattr(Fingerprints, "check", wrong)
    with pytest.raises(VerificationError):
        loss(x)
    assert equal(weights(loss), before)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_plan_is_saved_read_and_run(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plan = ebbtide.plan(
        model, (batch(),), budget="100%", options=ebbtide.Options(optimizer=optimizer, step="inside", progress=None)
    )
    plan.save(tmp_path / "plan.json")
    again = ebbtide.Plan.load(tmp_path / "plan.json")
    assert again.program == plan.program
    with pytest.raises(PlanMismatch, match='step="inside"'):
        ebbtide.fit(model, again, optimizer=optimizer, progress=None)(batch())
    ebbtide.unfit(model)
    ebbtide.fit(model, again, optimizer=optimizer, step="inside", progress=None)
    for seed in range(3):
        step((model, optimizer), seed)
    assert equal(weights(model), weights(eager(3)[0]))


def test_another_optimizer_takes_over(pair: Pair) -> None:
    model, _ = pair
    step(pair)
    model.zero_grad()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    ebbtide.set_optimizer(model, other)
    twin, _ = eager(1)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    assert_steps_alike((model, other), (twin, plain), 2)


def test_unfit_ends_it(pair: Pair) -> None:
    model, optimizer = pair
    model(batch()).backward()
    ebbtide.unfit(model)
    assert all(type(each) is nn.Parameter for each in model.parameters())
    step((model, optimizer), 1)
    assert model.first.weight.grad is not None


@pytest.mark.parametrize("verify", ["always", False])
def test_every_step_or_none_is_proven_on_request(verify: Any) -> None:
    pair = fitted(verify=verify)
    for seed in range(3):
        step(pair, seed)
    assert equal(weights(pair[0]), weights(eager(3)[0]))


def test_a_rehearsal_frees_what_the_forward_has_saved_after_its_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest activation is of the last layer, and is gone when the first one's gradient comes."""
    width = 37
    alive: list[int] = []

    def update(self: object, position: int, gradient: Tensor) -> None:
        alive.append(sum(type(each) is Tensor and each.shape == (16, width) for each in gc.get_objects()))

    monkeypatch.setattr("ebbtide.engine.executor._Dropping.update", update)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, width), nn.Sigmoid(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inside(model, optimizer, gradients="all")
    model(batch())
    assert len(alive) == 6
    assert alive[0] > 0
    assert alive[-1] == 0


def test_gradients_of_a_round_that_only_sums_are_clipped() -> None:
    """As at the end of an epoch whose last round is not whole."""
    (model, optimizer), (twin, plain) = with_twin(torch.optim.AdamW, max_norm=0.01)
    for rounds in ((True, False), (True, True), (False,)):
        for seed, only_sums in enumerate(rounds):
            with ebbtide.no_update(model) if only_sums else contextlib.nullcontext():
                model(batch(seed)).backward()
            twin(batch(seed)).backward()
        total = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
        assert torch.equal(ebbtide.total_norm(model), total)
        assert equal(weights(model), weights(twin))


@pytest.mark.parametrize("sums_all", [False, True])
def test_a_closure_makes_its_gradients_before_they_are_clipped(sums_all: bool) -> None:
    """As Lightning's trainer steps: the last backward of a round is called by the step itself."""
    (model, optimizer), (twin, plain) = with_twin(lambda p: torch.optim.SGD(p, lr=0.1), max_norm=0.01)

    def closure() -> Tensor:
        with ebbtide.no_update(model) if sums_all else contextlib.nullcontext():
            loss = model(batch(1))
        loss.backward()
        return loss.detach()

    for _ in range(3):
        with ebbtide.no_update(model):
            model(batch(0)).backward()
        optimizer.step(closure)
        for seed in (0, 1):
            twin(batch(seed)).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
        plain.step()
        for each in (optimizer, plain):
            each.zero_grad()
        assert equal(weights(model), weights(twin))
