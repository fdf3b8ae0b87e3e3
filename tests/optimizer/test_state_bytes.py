"""The state that an optimizer will hold is foreseen to the byte, and foreseeing it changes nothing."""

from __future__ import annotations

import copy
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import UsageError
from ebbtide.measurement.resident import resident_bytes
from ebbtide.optimizer.cost.step_bytes import step_bytes
from ebbtide.optimizer.offload.optimizer_offload import offload_of
from ebbtide.optimizer.state.future_bytes import future_state_bytes
from ebbtide.torch_seams.offloaded import is_offloaded
from ebbtide.transfers.disk import disk_tier
from ebbtide.zoo import mlp_chain

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "Adam with AMSGrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "Adafactor": torch.optim.Adafactor,
    "Adafactor of transformers": lambda p: pytest.importorskip("transformers.optimization").Adafactor(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "ASGD": torch.optim.ASGD,
    "Adam, foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "Own kernels": lambda p: OwnKernels(p, lr=0.1),
    "Careful": lambda p: Careful(p, lr=0.1),
}


class OwnKernels(torch.optim.SGD):
    """Computes outside of torch, as optimizers with compiled kernels do; a factor per row, one per column."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.detach().numpy()[...] -= parameter.grad.numpy()
                state = self.state[parameter]
                state["all"] = torch.zeros_like(parameter, dtype=torch.float64)
                state["rows"] = parameter.new_zeros(parameter.shape[0])
                state["columns"] = parameter.new_zeros(parameter.shape[-1])


class Careful(torch.optim.SGD):
    """Raises where it sees what it takes for an overflow."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if torch.isnan(parameter.grad).any():
                    raise FloatingPointError("nan")
                self.state[parameter]["seen"] = torch.zeros_like(parameter)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.LayerNorm(16))


def step_by_ones(optimizer: torch.optim.Optimizer) -> None:
    """Step all that is trained by gradients of ones."""
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = torch.ones_like(each) if each.requires_grad else None
    optimizer.step()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return resident_bytes([dict(optimizer.state)[p] for p in optimizer.state])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_foreseen_is_what_comes(name: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    before = state_bytes(optimizer)
    foreseen = future_state_bytes(optimizer)
    assert state_bytes(optimizer) == before
    step_by_ones(optimizer)
    assert state_bytes(optimizer) == before + foreseen
    if name != "Adagrad":  # which makes its state when it is built
        assert (foreseen > 0) == (name != "SGD")
    assert future_state_bytes(optimizer) == 0 or name == "SGD"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_foreseeing_takes_no_memory(name: str) -> None:
    parameter = nn.Parameter(torch.ones(512, 512))
    optimizer = OPTIMIZERS[name]([parameter])
    with ebbtide.measure(parameter) as measured:
        future_state_bytes(optimizer)
    assert measured.above_bytes < 4096 + torch.get_rng_state().nbytes  # which is kept


def test_groups_keep_their_options() -> None:
    model = net()
    groups = [
        {"params": model[0].parameters(), "momentum": 0.9},
        {"params": model[1].parameters(), "momentum": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert future_state_bytes(optimizer) == resident_bytes([model[0]])


def test_frozen_parameters_get_no_state() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    foreseen = future_state_bytes(optimizer)
    step_by_ones(optimizer)
    assert state_bytes(optimizer) == foreseen


def test_foreseeing_changes_no_parameter_and_no_random_state() -> None:
    model = net()
    twin = copy.deepcopy(model)
    state = torch.get_rng_state()
    future_state_bytes(torch.optim.Adam(model.parameters()))
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


class _Drawing(torch.optim.SGD):
    """Draws and counts as it steps; one that fake tensors cannot step, with real stand-ins."""

    steps = 0
    real = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        type(self).steps += 1
        for group in self.param_groups:
            for each in group["params"]:
                noise = float(np.random.rand()) + random.random() + torch.rand(1).item()
                if type(self).real:
                    noise += float(each.grad.numpy().sum())
                self.state[each]["noise"] = torch.full_like(each, noise)


@pytest.mark.parametrize("real", [False, True])
def test_trying_an_optimizer_out_leaves_what_it_draws_and_counts_as_it_was(real: bool) -> None:
    _Drawing.real, _Drawing.steps = real, 7
    optimizer = _Drawing(net().parameters(), lr=0.1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    assert future_state_bytes(optimizer) > 0
    step_bytes(optimizer)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert _Drawing.steps == 7


class _MasterWeights(torch.optim.Optimizer):
    """Steps copies in double precision by another optimizer, which keeps the state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        own = [each for group in self.param_groups for each in group["params"]]
        self.copies = [torch.nn.Parameter(each.detach().double()) for each in own]
        self.inner = torch.optim.Adam(self.copies, lr)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        own = [each for group in self.param_groups for each in group["params"]]
        for each, copied in zip(own, self.copies, strict=True):
            copied.grad = each.grad.double()
        self.inner.step()
        for each, copied in zip(own, self.copies, strict=True):
            copied.grad = None
            each.data.copy_(copied)


class _Uncopied(dict[str, int]):
    def __deepcopy__(self, _: object) -> None:
        raise TypeError("it cannot be copied")


def test_attributes_that_cannot_be_copied_or_are_of_each_parameter_are_the_constructors() -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, lr=lr, momentum=0.9)
            self.scales = [1.0 for group in self.param_groups for _ in group["params"]]
            self.options = _Uncopied(most=1)
            self.itself: list[object] = []
            self.itself.append(self.itself)

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            assert len(self.scales) == sum(len(group["params"]) for group in self.param_groups)
            return super().step(closure)

    model = net()
    optimizer = Odd(model.parameters())
    optimizer.param_groups[0]["lock"] = {"lock": threading.Lock()}
    assert future_state_bytes(optimizer) == sum(each.nbytes for each in model.parameters())
    assert step_bytes(optimizer) is not None


def test_state_of_copies_that_an_inner_optimizer_steps_comes_once() -> None:
    weights = [torch.nn.Parameter(torch.ones(64, 32)) for _ in range(2)]
    optimizer = _MasterWeights(weights)
    for each in weights:
        each.grad = torch.ones_like(each)
    before, foreseen = resident_bytes([optimizer]), future_state_bytes(optimizer)
    assert foreseen > 0
    step_by_ones(optimizer)
    assert resident_bytes([optimizer]) - before == foreseen
    assert future_state_bytes(optimizer) == 0


def test_an_optimizer_that_cannot_be_foreseen_is_refused_by_name() -> None:
    class Peculiar(torch.optim.SGD):
        def __init__(self, params: object, must_have: int) -> None:
            super().__init__(params, lr=0.1, momentum=must_have)  # type: ignore[arg-type]

    optimizer = Peculiar(net().parameters(), 1)
    with pytest.raises(UsageError, match="Peculiar"):
        future_state_bytes(optimizer)


def test_plan_and_fit_reserve_the_same() -> None:
    case = mlp_chain(32, layers=2, width=8)
    optimizer = torch.optim.AdamW(case.model.parameters())
    plan = ebbtide.plan(case.model, case.args, budget="1MiB", options=ebbtide.Options(optimizer=optimizer))
    ebbtide.fit(case.model, "1MiB", optimizer=optimizer)
    case.model(*case.args).backward()
    fitted = ebbtide.plan_of(case.model)
    assert fitted is not None
    assert fitted.reserve_bytes == plan.reserve_bytes
    assert fitted.resident_bytes == plan.resident_bytes
    assert plan.reserve_bytes > 2 * sum(p.nbytes for p in case.model.parameters())


def test_an_optimizer_that_keeps_all_with_one_parameter_is_known_once_it_has_stepped() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    with pytest.raises(ebbtide.errors.UsageError, match="one optimizer step before fit"):
        future_state_bytes(optimizer)
    optimizer.step(closure)
    assert future_state_bytes(optimizer) == 0


def test_a_second_step_on_the_same_gradients_is_no_training_past_the_model() -> None:
    model = ebbtide.fit(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), "1GiB", options=ebbtide.Options(effort=50)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.step()
    assert ebbtide.calls_of(model).unplanned == {}


def test_an_optimizer_that_accelerate_has_wrapped_is_the_one_behind_it(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = torch.nn.Linear(256, 256)
    plain = torch.optim.AdamW(model.parameters())
    wrapped = accelerate.Accelerator(cpu=True).prepare(plain)
    assert type(wrapped) is not type(plain)
    assert future_state_bytes(wrapped) == future_state_bytes(plain) > 0
    assert step_bytes(wrapped) == step_bytes(plain)
    model(torch.randn(4, 256)).sum().backward()
    wrapped.step()
    offload_of(wrapped, disk_tier(tmp_path)).send()
    state = plain.state[model.weight]["exp_avg"]
    assert is_offloaded(state)
    wrapped.step()
    assert not is_offloaded(state)


def test_what_a_signals_handler_raises_is_no_answer_of_the_optimizers() -> None:
    """It is the user's timeout, and comes up though errors of a trial step do not."""

    class Interrupted(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            signal.raise_signal(signal.SIGINT)
            super().step()

    def out_of_time(*_: object) -> None:
        raise TimeoutError

    optimizer = Interrupted([nn.Parameter(torch.zeros(3))], lr=0.1, momentum=0.9)
    before = signal.signal(signal.SIGINT, out_of_time)
    try:
        for look in (step_bytes, future_state_bytes):
            with pytest.raises(TimeoutError):
                look(optimizer)
    finally:
        signal.signal(signal.SIGINT, before)


class _Masters(torch.optim.Optimizer):
    """Keeps what it steps in an attribute, and its averages too; whether it averages is no option of its groups."""

    def __init__(self, params: Any, lr: float = 0.1, *, averages: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.averages = averages
        self.masters = {id(p): p.detach().double() for group in self.param_groups for p in group["params"]}
        self.averaged: dict[str, list[torch.Tensor]] = {"of all": []}

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for each in group["params"]:
                master = self.masters[id(each)]
                master -= group["lr"] * each.grad.double()
                each.data.copy_(master)
                if self.averages and len(self.averaged["of all"]) < len(self.masters):
                    self.averaged["of all"].append(torch.zeros_like(master))


def test_what_an_optimizer_keeps_in_attributes_counts() -> None:
    weights = [torch.nn.Parameter(torch.ones(8, 4)), torch.nn.Parameter(torch.ones(16))]
    elements = sum(each.numel() for each in weights)
    plain, averaging = _Masters(weights), _Masters(weights, averages=True)
    assert resident_bytes([plain]) == 4 * elements + 8 * elements
    assert future_state_bytes(plain) == 0
    assert future_state_bytes(averaging) == 8 * elements
    for each in weights:
        each.grad = torch.ones_like(each)
    before = resident_bytes([averaging])
    averaging.step()
    assert resident_bytes([averaging]) - before == 8 * elements


def test_optimizers_in_a_list_of_another_count() -> None:
    class Several(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            params = list(params)
            super().__init__(params, {})
            self.parts = [torch.optim.Adam([each]) for each in params]

        def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for each in self.parts:
                each.step()

    weights = [torch.nn.Parameter(torch.ones(8, 4)), torch.nn.Parameter(torch.ones(16))]
    several = Several(weights)
    without = resident_bytes([several])
    for each in weights:
        each.grad = torch.ones_like(each)
    several.step()
    state = sum(2 * each.nbytes + 4 for each in weights)
    assert resident_bytes([several]) - without == state + sum(each.nbytes for each in weights)
