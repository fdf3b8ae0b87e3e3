"""Optimizers in the step: which cannot be there, how that is found out, their options, and the order of their state."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.errors import BudgetError, UsageError
from ebbtide.optimizer.in_step.single_parameter import step_parameter
from ebbtide.torch_seams.optimizers import gradient_of
from engine.pairs import (
    Descent,
    Net,
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
from sampled import sampled


def test_state_that_comes_later_stands_behind_the_rest_in_order() -> None:
    def order(*, planned: bool) -> list[int]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if planned:
            inside(model, optimizer)
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
    _, optimizer = inside(model, kind(model.parameters(), lr=0.1))

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


def test_options_in_attributes_are_those_of_the_updates() -> None:
    assert_steps_alike(*with_twin(Clips), steps=2)


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
            inside(model, optimizer)
        with ebbtide.no_update(model) if planned else contextlib.nullcontext():
            model(batch(), (0, 1, 2)).backward()
        model(batch(), (0, 2)).backward()
        optimizer.step()
        return list(optimizer.state_dict()["state"])

    assert order(planned=True) == order(planned=False)


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
    pair, twin = with_twin(make)
    plans: list[object] = []
    for number in range(4):
        for each in (pair[1], twin[1]):
            for group in each.param_groups:
                group.update(changed if number >= 2 else {})
                group["lr"] = 0.0 if number == 0 else 0.1  # a schedule's beginning asks for no other plan
        assert_steps_alike(pair, twin, steps=1)
        plans.append(ebbtide.plan_of(pair[0]))
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


def test_parameters_in_the_same_memory_are_refused_and_parts_of_one_are_not() -> None:
    model = Net()
    whole = torch.zeros(64)
    model.first.weight.data = whole[:48].view(8, 6)
    model.last.weight.data = whole[48:].view(2, 8)
    inside(model, torch.optim.AdamW(model.parameters()))
    ebbtide.unfit(model)
    model.last.weight.data = whole[40:56].view(2, 8)
    with pytest.raises(UsageError, match="two parameters lie in the same memory"):
        inside(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_state_to_come_is_in_the_budget_of_every_micro_batch(where: Any) -> None:
    """A budget without room for it beside summed gradients is refused before the first optimizer step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    before = weights(model)
    optimizer = torch.optim.AdamW(model.parameters())
    ebbtide.fit(model, 10_000, optimizer=optimizer, step=where, progress=None)
    x = torch.randn(8, 256)
    with pytest.raises(BudgetError) as refused:
        model(x).square().mean().backward()
    assert refused.value.smallest_bytes is not None
    ebbtide.set_budget(model, refused.value.smallest_bytes + 2**12)

    def micro_batches() -> None:
        with ebbtide.no_update(model):
            for _ in range(3):
                model(x).square().mean().backward()

    with pytest.raises(BudgetError) as later:
        micro_batches()
    assert all(map(torch.equal, before, weights(model))), "no weight has changed"
    assert later.value.smallest_bytes is not None
    if where == "inside":
        return  # the step that updates is another one, and is refused for itself, before it does
    model.zero_grad()
    ebbtide.set_budget(model, later.value.smallest_bytes + 2**12)
    for _ in range(2):
        with ebbtide.no_update(model):
            model(x).square().mean().backward()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class _Positions(nn.Module):
    """Learned positions, and a batch of one: their gradient is that of what they are added to."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(20, 8), nn.Parameter(torch.zeros(1, 9, 8))
        self.last = nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(9)[None]
        hidden = torch.relu(self.words(tokens) + self.positions) * x.sum()
        return nn.functional.cross_entropy(self.last(hidden).flatten(0, 1), tokens.flatten())


class _Delta(nn.Module):
    """A weight and what is added to it have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.delta = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.zeros(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ (self.weight + self.delta)).square().mean()


class _WritesGradients(Descent):
    def of(self, group: dict[str, Any], parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.sub_(parameter.grad.mul_(group["lr"]))


def _nesterov(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True)


@pytest.mark.parametrize("make", [_nesterov, _WritesGradients])
@pytest.mark.parametrize("kind", [_Positions, _Delta])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_what_writes_to_gradients_writes_to_nobody_elses(kind: Any, make: Any, max_norm: float | None) -> None:
    options = {} if max_norm is None else {"max_norm": max_norm}
    assert_steps_alike(*with_twin(make, kind, **options), steps=5, max_norm=max_norm)


def test_norms_of_complex_and_real_gradients_are_added_up_in_torchs_order() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.turn = nn.Linear(6, 8), nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
            self.last = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last((self.first(x).to(torch.complex64) @ self.turn).abs()).square().mean()

    assert_steps_alike(*with_twin(torch.optim.AdamW, Mixed, max_norm=0.01), steps=6, max_norm=0.01)


class _DecaysAll(Descent):
    def of(self, group: dict[str, Any], parameter: Tensor) -> None:
        parameter.data.mul_(0.99)
        super().of(group, parameter)


class _CountsAll(Descent):
    def of(self, group: dict[str, Any], parameter: Tensor) -> None:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        super().of(group, parameter)


class _FillsIn(Descent):
    def of(self, group: dict[str, Any], parameter: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        super().of(group, parameter)


class _AveragesAll(Descent):
    def of(self, group: dict[str, Any], parameter: Tensor) -> None:
        super().of(group, parameter)
        self.state[parameter].setdefault("average", parameter.detach().clone()).lerp_(parameter, 0.1)


class _SkipsAllIfOneIsInfinite(Descent):
    def of_group(self, group: dict[str, Any]) -> None:
        if all(each.grad is None or bool(each.grad.isfinite().all()) for each in group["params"]):
            super().of_group(group)


class _SkipsAllIfOneIsMissing(Descent):
    def of_group(self, group: dict[str, Any]) -> None:
        if all(each.grad is not None for each in group["params"]):
            super().of_group(group)


class _ByTheBias(Descent):
    def of_group(self, group: dict[str, Any]) -> None:
        by_length = {len(each): each for each in group["params"] if each.ndim == 1}
        for each in group["params"]:
            bias = by_length.get(len(each)) if each.ndim == 2 else None
            if bias is not None and bias.grad is not None and each.grad is not None:
                each.grad.mul_(1 + bias.grad.abs().mean())
        super().of_group(group)


class _Base(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class _Calling(_Base):
    """Calls the step of its base, of which nobody may have made an object before."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


_OTHER_BITS = "gives other bits than all together"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: FirstRate(p, lr=0.1), _OTHER_BITS),
        (CountsInTensor, _OTHER_BITS),
        (lambda p: Wants(p, 0.1), "needs a default in its __init__"),
        *(((lambda p, most=most: Clips(p, most)), _OTHER_BITS) for most in (1e-5, 1.0, 50.0)),
        (torch.optim.LBFGS, "LBFGS takes one step for all of its parameters"),
        (Coupled, _OTHER_BITS),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "differentiable=True"),
        (lambda p: _AllAtOnce(p, lr=0.1), "cannot be stepped on single parameters"),
        (lambda p: _Counting(p, lr=0.1), _OTHER_BITS),
        (lambda p: _Calling(p, lr=0.1), "calls its hooks from below its own step"),
        (_DecaysAll, _OTHER_BITS),
        (_CountsAll, _OTHER_BITS),
        (_FillsIn, "changes parameters or their state where there is no gradient"),
        (_AveragesAll, _OTHER_BITS),
        (_SkipsAllIfOneIsInfinite, _OTHER_BITS),
        (_SkipsAllIfOneIsMissing, _OTHER_BITS),
        (_ByTheBias, _OTHER_BITS),
    ],
)
def test_an_optimizer_that_is_not_of_single_parameters_is_refused(make: Callable[[Any], Any], why: str) -> None:
    model = Net()
    with pytest.raises(UsageError, match=why) as caught:
        inside(model, make(model.parameters()))
    assert "fit(model, budget, optimizer=optimizer)" in str(caught.value)
    with pytest.raises(UsageError, match=why):
        ebbtide.plan(
            model, (batch(),), budget="100%", options=ebbtide.Options(optimizer=make(model.parameters()), step="inside")
        )


def test_a_trial_changes_nothing_of_the_users() -> None:
    import random

    import numpy

    class Draws(Descent):
        def of(self, group: dict[str, Any], parameter: Tensor) -> None:
            group["lr"].mul_(0.9)
            if parameter.grad is not None:
                parameter.sub_(group["lr"] * parameter.grad * random.random() * numpy.random.rand())

    model = Net()
    optimizer = Draws(model.parameters(), lr=torch.tensor(0.1))
    states = random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state()  # type: ignore[union-attr]
    with pytest.raises(UsageError, match='step="inside" is not accepted'):
        inside(model, optimizer)
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.1)
    assert random.getstate() == states[0]
    assert numpy.random.get_state()[1].tobytes() == states[1]  # type: ignore[union-attr]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_draws_of_another_thread_are_not_the_optimizers() -> None:
    over = threading.Event()
    drawn: list[Tensor] = []

    def draw() -> None:
        while not over.is_set():
            drawn[:] = [torch.rand(3)]

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        pair = fitted()
    finally:
        over.set()
        thread.join()
    assert drawn
    assert ebbtide.calls_of(pair[0]).planned == 0, "it is fitted"


def test_a_step_that_was_put_on_the_object_is_refused_and_one_that_is_counted_is_not() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" in vars(optimizer), "schedulers count steps so"
    assert scheduler.get_last_lr() == [0.1]
    inside(model, optimizer)
    ebbtide.unfit(model)
    inner = optimizer.step

    def centred(*args: Any, **named: Any) -> Any:
        for each in model.parameters():
            if each.grad is not None:
                each.grad -= each.grad.mean()
        return inner(*args, **named)

    optimizer.step = centred  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="another step than that of its class"):
        inside(model, optimizer)


STEPPING: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw at once": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "rprop": lambda p: torch.optim.Rprop(p, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "own": lambda p: Descent(p, lr=0.1),
}


@pytest.mark.parametrize("how", ["loop", "closure", "hooks"])
@pytest.mark.parametrize("name", sampled(STEPPING, "adamw at once", "adamw", "own"))
def test_a_round_that_only_sums_steps_one_by_one_and_shows_its_gradients(name: str, how: str) -> None:
    """With the bits of eager, the order of its state, and gradients for whoever looks before and after the step."""

    def train(*, planned: bool) -> list[Any]:
        torch.manual_seed(0)
        model = Net()
        optimizer = STEPPING[name](model.parameters())
        found: list[Any] = []

        def look(*_: object) -> None:
            found.append([None if each.grad is None else each.grad.clone() for each in model.parameters()])

        if planned:
            inside(model, optimizer)
        if how == "hooks":
            optimizer.register_step_pre_hook(look)
            optimizer.register_step_post_hook(look)

        def backward() -> Tensor:
            with ebbtide.no_update(model) if planned else contextlib.nullcontext():
                loss = model(batch(len(found)))
            loss.backward()
            return loss

        for _ in range(3):
            if how != "closure" or name == "own":
                backward()
                optimizer.step()
                optimizer.step()  # once more by the same gradients
            else:
                found.append(optimizer.step(backward))
            look()
            optimizer.zero_grad()
        return [found, weights(model), str(optimizer.state_dict())]

    mine, theirs = train(planned=True), train(planned=False)
    assert len(mine[0]) == len(theirs[0])
    for one, other in zip(mine[0], theirs[0], strict=True):
        assert equal(one, other) if isinstance(one, list) else torch.equal(one, other)
    assert equal(mine[1], theirs[1])
    assert mine[2] == theirs[2]


@pytest.mark.parametrize("name", sampled(STEPPING, "adamw", "adafactor", "own"))
def test_a_round_that_only_sums_is_within_its_budget(name: str) -> None:
    """All gradients are there, and what the step takes of one parameter at a time."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    optimizer, x = STEPPING[name](model.parameters()), torch.randn(64, 128)
    ebbtide.fit(model, 10_000, optimizer=optimizer, step="inside", progress=None)

    def sums() -> None:
        with ebbtide.no_update(model):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    budget = 0
    for _ in range(6):
        try:
            sums()
        except BudgetError as error:
            optimizer.zero_grad()
            budget = (error.smallest_bytes or 0) + 4096
            ebbtide.set_budget(model, budget)
    with ebbtide.measure(model, optimizer, x) as gauge:
        sums()
    assert gauge.peak_bytes <= budget


def test_a_step_that_fails_while_it_steps_one_by_one_leaves_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = fitted()
    with ebbtide.no_update(model):
        model(batch()).backward()
    kept = [each.grad for each in model.parameters()]
    made = iter(range(2))

    def fails(*args: Any) -> None:
        if next(made, None) is None:
            raise KeyboardInterrupt
        step_parameter(*args)

    monkeypatch.setattr("ebbtide.optimizer.in_step.optimizer_in_backward.step_parameter", fails)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert [each.grad for each in model.parameters()] == kept


def test_a_step_that_is_interrupted_after_it_has_stepped_leaves_no_old_gradients() -> None:
    """The next step is by the gradients of the next backward."""
    model, optimizer = fitted()
    twin, plain = eager()
    interrupts = iter([True])

    class Interrupted(type(optimizer)):  # type: ignore[misc]
        def _cuda_graph_capture_health_check(self) -> None:
            return

        def _init_group(self, *args: Any) -> Any:
            if all(gradient_of(each) is None for each in model.parameters()) and next(interrupts, False):
                raise KeyboardInterrupt
            return super()._init_group(*args)

    for seed in range(2):
        with ebbtide.no_update(model):
            model(batch(seed)).backward()
        if not seed:
            optimizer.__class__ = Interrupted
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        step((twin, plain), seed)
    assert equal(weights(model), weights(twin))


@pytest.mark.parametrize("sums", [False, True])
def test_a_hook_that_leaves_a_step_out_is_no_step(*, sums: bool) -> None:
    """Where the weights have been updated, what clears gradients says so; where they have not, they stay."""
    model, optimizer = fitted()

    class Skip(Exception):
        pass

    def skip(*_: object) -> None:
        raise Skip

    optimizer.register_step_pre_hook(skip)
    before = weights(model)
    with ebbtide.no_update(model) if sums else contextlib.nullcontext():
        loss = model(batch())
    loss.backward()
    with pytest.raises(Skip):
        optimizer.step()
    if sums:
        assert equal(weights(model), before)
        assert all(each.grad is not None for each in model.parameters())
        optimizer.zero_grad()
        return
    with pytest.raises(UsageError, match="cleared"):
        optimizer.zero_grad()
