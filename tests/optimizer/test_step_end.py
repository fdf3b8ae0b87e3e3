"""The budget holds at ``optimizer.step()`` of an optimizer that was told of, whose state stays where it is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.errors import BudgetError, UsageError
from engine.pairs import Descent, Net, batch
from sampled import sampled

MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw at once": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "muon": lambda p: torch.optim.Muon([each for each in p if each.ndim == 2]),
}


class Wide(nn.Module):
    """Weights that take far more than a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def wide() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Wide(), torch.randn(16, 128)


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, micro: int = 1) -> Tensor:
    for _ in range(micro):
        loss = model(x)
        loss.backward()
    optimizer.step()
    model.zero_grad()
    return loss.detach()


def smallest(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> int:
    """The smallest budget of a step of ``model`` and its optimizer."""
    with pytest.raises(BudgetError) as refused:
        ebbtide.plan(model, (x,), budget="1KiB", options=ebbtide.Options(optimizer=optimizer, progress=None))
    return refused.value.smallest_bytes or 0


@pytest.mark.parametrize(
    ("name", "micro"), sampled(product(MAKE, [1, 3]), ("adamw at once", 1), ("adafactor", 1), ("muon", 3))
)
def test_the_whole_step_is_within_the_smallest_budget(name: str, micro: int) -> None:
    model, x = wide()
    optimizer = MAKE[name](model.parameters())
    ebbtide.fit(model, 10_000, optimizer=optimizer, progress=None)
    budget = 0
    refusals = 0
    for _ in range(8):
        try:
            loss = whole_step(model, optimizer, x, micro)
        except BudgetError as error:
            optimizer.zero_grad()
            refusals += 1
            budget = error.smallest_bytes or 0
            ebbtide.set_budget(model, budget)
    assert loss > 0
    assert refusals <= (1 if micro == 1 else 2), "summed gradients are known from the second micro-batch on"
    with ebbtide.measure(model, optimizer, x) as gauge:
        whole_step(model, optimizer, x, micro)
    assert gauge.peak_bytes <= budget


def test_what_pins_such_a_budget_is_named_with_what_would_help() -> None:
    model, x = wide()
    optimizer = MAKE["adamw at once"](model.parameters())
    options = ebbtide.Options(optimizer=optimizer, progress=None)

    def refused(budget: int) -> BudgetError:
        with pytest.raises(BudgetError, match="the tensors that AdamW makes while it steps") as raised:
            ebbtide.plan(model, (x,), budget=budget, options=options)
        return raised.value

    needed: list[int] = []
    for foreach in (True, False):
        optimizer.param_groups[0]["foreach"] = foreach
        far = refused(2**20)
        assert "foreach" not in str(far)  # which would not do by itself
        assert far.smallest_bytes is not None
        near = str(refused(far.smallest_bytes - 1))
        assert ("foreach=False" in near) == foreach
        assert "fused=True" in near
        needed.append(far.smallest_bytes)
    weights = sum(each.nbytes for each in model.parameters())
    assert needed[0] - needed[1] > weights / 2
    plan = ebbtide.plan(model, (x,), budget=needed[1], options=options)
    assert "what optimizer.step() takes while it runs" in plan.details
    assert "not what optimizer.step()" not in plan.details


def test_a_share_is_of_the_larger_of_both_peaks() -> None:
    model, x = wide()
    optimizer = MAKE["adamw at once"](model.parameters())
    plan = ebbtide.plan(model, (x,), budget="100%", options=ebbtide.Options(optimizer=optimizer, progress=None))
    assert plan.budget_bytes >= plan.smallest_bytes > plan.predicted_peak_bytes
    ebbtide.fit(model, "100%", optimizer=optimizer, progress=None)
    with ebbtide.measure(model, optimizer, x) as gauge:
        whole_step(model, optimizer, x)
    fitted = ebbtide.plan_of(model)
    assert fitted is not None
    assert gauge.peak_bytes <= fitted.budget_bytes


def test_options_that_make_it_take_more_are_seen_at_the_next_call() -> None:
    model, x = wide()
    optimizer = MAKE["adamw"](model.parameters())
    ebbtide.fit(model, smallest(model, x, optimizer) + 2**16, optimizer=optimizer, progress=None)
    whole_step(model, optimizer, x)
    optimizer.param_groups[0]["foreach"] = True
    with pytest.raises(BudgetError, match="the tensors that AdamW makes while it steps"):
        whole_step(model, optimizer, x)


class _Options(torch.optim.SGD):
    """Takes a copy of all weights, where one of its options says so."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.flag, self.pair, self.inner = False, (0.0, 0.9), {"all at once": False}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if self.flag or self.pair[0] or self.inner["all at once"]:
                copies = [each.clone() for each in group["params"]]
                del copies
            for each in group["params"]:
                each.sub_(each.grad, alpha=group["lr"])


@pytest.mark.parametrize(
    ("option", "at_once"),
    [*((each, True) for each in ("flag", "pair", "inner")), *((each, False) for each in ("flag", "pair", "momentum"))],
)
def test_options_in_whatever_form_are_seen(option: str, at_once: bool) -> None:
    """A momentum that is warmed up from 0 is state that is still to come."""
    model, x = wide()
    kind = torch.optim.SGD if option == "momentum" else _Options
    optimizer: Any = kind(model.parameters(), lr=0.1)
    budget = smallest(model, x, optimizer) + 2**16

    def change() -> None:
        if option == "momentum":
            optimizer.param_groups[0]["momentum"] = 0.9
        elif option == "inner":
            optimizer.inner["all at once"] = True
        else:
            setattr(optimizer, option, {"flag": True, "pair": (0.9, 0.9)}[option])

    if at_once:
        change()
    ebbtide.fit(model, budget, optimizer=optimizer, progress=None)
    if not at_once:
        whole_step(model, optimizer, x)
        change()
    with pytest.raises(BudgetError):
        whole_step(model, optimizer, x)


@pytest.mark.parametrize("change", ["foreach", "momentum", "group"])
def test_options_that_are_changed_before_the_step_are_refused(change: str) -> None:
    model, x = wide()
    more = nn.Parameter(torch.zeros(512, 512))
    kind = torch.optim.SGD if change == "momentum" else torch.optim.AdamW
    optimizer: Any = kind(model.parameters(), lr=1e-3, foreach=False)
    ebbtide.fit(model, smallest(model, x, optimizer) + 2**16, optimizer=optimizer, progress=None)
    whole_step(model, optimizer, x)
    model(x).backward()
    group = optimizer.param_groups[0]
    if change == "group":
        optimizer.add_param_group({"params": [more]})
    else:
        group[change] = 0.9 if change == "momentum" else True
    before = [each.detach().clone() for each in model.parameters()]
    for _ in range(2):
        with pytest.raises(UsageError, match="were changed between the forward and"):
            optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    if change == "group":
        del optimizer.param_groups[1]
    else:
        group[change] = 0.0 if change == "momentum" else False
    optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))


def test_options_of_a_step_without_gradients_are_nobodys() -> None:
    model, x = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    ebbtide.fit(model, smallest(model, x, optimizer) + 2**16, optimizer=optimizer, progress=None)
    model(x).backward()
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.zero_grad()
    optimizer.step()
    with pytest.raises(BudgetError):
        model(x)


def test_a_refusal_while_an_error_is_handled_leaves_the_frames_of_that_error() -> None:
    """Also those of a generator that goes on: clearing its frame would end it."""
    model, x = wide()
    ebbtide.fit(model, "1KiB", progress=None)

    def handling() -> Iterator[ValueError | str]:
        try:
            raise ValueError("the user's")
        except ValueError as error:
            yield error
            yield "goes on"

    suspended = handling()
    found = next(suspended)
    assert isinstance(found, ValueError)
    try:
        raise found
    except ValueError:
        with pytest.raises(BudgetError):
            model(x)
    assert next(suspended) == "goes on"


def test_a_refused_batch_is_let_go() -> None:
    model, x = wide()
    ebbtide.fit(model, 8 * sum(each.nbytes for each in model.parameters()), progress=None)
    model(x).backward()
    model.zero_grad()
    large = x.repeat(400, *[1] * (x.ndim - 1))
    batch = weakref.ref(large)
    gc.collect()
    gc.disable()
    try:
        model(large)
    except BudgetError:
        del large
    finally:
        gc.enable()
    assert batch() is None


def test_a_step_that_cannot_be_tried_is_said_not_to_be_counted() -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    plain = Net()
    optimizer.step(lambda: plain(batch()).detach())  # its state is there
    ebbtide.fit(model, "1GiB", optimizer=optimizer, progress=None)
    with pytest.warns(UserWarning, match="what LBFGS takes while it steps cannot be found out"):
        model(batch()).backward()
    model(batch()).backward()  # said once
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert "not what optimizer.step() takes while it runs, which cannot be found out" in plan.details


def test_a_closure_is_said_of_an_optimizer_that_nobody_told_of() -> None:
    model = ebbtide.fit(Net(), "1GiB", progress=None)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch())
        loss.backward()
        return loss.detach()

    with pytest.warns(UserWarning, match="what LBFGS takes while it steps cannot be found out"):
        optimizer.step(closure)
    optimizer.step(closure)  # said once


class Mixed(Descent):
    """Momentum in float32 of weights in bfloat16: its sums cast what they add."""

    def of(self, group: dict[str, Any], parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["momentum"].add_(parameter.grad)
        parameter.add_(state["momentum"], alpha=-group["lr"])


def test_sums_of_several_types_take_what_they_cast() -> None:
    torch.manual_seed(0)
    model, x = Wide().bfloat16(), torch.randn(4, 128).bfloat16()
    optimizer = Mixed(model.parameters())
    budget = smallest(model, x, optimizer)
    ebbtide.fit(model, budget, optimizer=optimizer, progress=None)
    for _ in range(2):
        whole_step(model, optimizer, x)
    with ebbtide.measure(model, optimizer, x) as gauge:
        whole_step(model, optimizer, x)
    assert gauge.peak_bytes <= budget


@pytest.mark.filterwarnings("ignore:another forward of this model is in flight")
def test_forwards_pending_are_gone_when_the_optimizer_steps() -> None:
    model, x = wide()
    optimizer = MAKE["adamw at once"](model.parameters())
    plain = ebbtide.plan(model, (x,), budget="1GiB", options=ebbtide.Options(optimizer=optimizer, progress=None))
    needed = plain.resident_bytes + plain.smallest_bytes
    ebbtide.fit(model, needed, optimizer=optimizer, progress=None)
    large = torch.randn(256, 128)
    before = [each.detach().clone() for each in model.parameters()]
    for _ in range(3):
        (model(large) + model(large)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert ebbtide.calls_of(model).planned == 6
    assert not any(map(torch.equal, before, model.parameters())), "no round was refused"


def test_state_of_a_group_that_is_added_later_is_planned_for_before_its_first_step() -> None:
    model, x = wide()
    layers = list(model.get_submodule("layers").children())
    early, late = ([p for each in part for p in each.parameters()] for part in (layers[:2], layers[2:]))
    optimizer = torch.optim.AdamW(early, foreach=True)
    ebbtide.fit(model, 10_000, optimizer=optimizer, progress=None)
    with pytest.raises(BudgetError) as refused:
        model(x)
    ebbtide.set_budget(model, refused.value.smallest_bytes or 0)
    for _ in range(3):
        whole_step(model, optimizer, x)
    optimizer.add_param_group({"params": late})
    before = [each.detach().clone() for each in model.parameters()]
    for _ in range(2):
        with pytest.raises(BudgetError) as refused:
            whole_step(model, optimizer, x)
    assert all(map(torch.equal, before, model.parameters()))
    budget = refused.value.smallest_bytes or 0
    ebbtide.set_budget(model, budget)
    for _ in range(3):
        with ebbtide.measure(model, optimizer, x) as gauge:
            whole_step(model, optimizer, x)
        assert gauge.peak_bytes <= budget
