"""Global-norm clipping with the optimizer in the step: the bits of backward, ``clip_grad_norm_`` and step outside."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.numerics.test_inside_steps import (
    Deep,
    Lora,
    Mlp,
    Tied,
    adamw,
    assert_as_outside,
    assert_same,
    floats,
    outcome,
    sgd,
    tokens,
)
from torch import Tensor, nn

import ebbtide
from ebbtide.engine.fitted_class import FITTED
from ebbtide.errors import BudgetError, CaptureError, UsageError
from ebbtide.measurement.cpu_allocations import AllocationRecorder, peak_above
from ebbtide.measurement.resident import resident_bytes
from ebbtide.step.legality import check
from ebbtide.zoo import GPTConfig, gpt


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, momentum=0.9)


def clipper(model: nn.Module, **how: Any) -> Callable[[], Tensor]:
    return lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), **how)


@pytest.mark.parametrize("of", [momentum, adamw])
@pytest.mark.parametrize(
    ("make", "arguments", "max_norm"),
    [
        (Mlp, floats(16, 8), 0.01),
        (Mlp, floats(16, 8), 1e6),
        (lambda: Mlp(torch.bfloat16), floats(16, 8, dtype=torch.bfloat16), 0.01),
        (Tied, tokens, 0.5),
        (Lora, floats(12, 16), 0.001),
    ],
    ids=["mlp", "never clipped", "bf16", "tied", "lora"],
)
def test_clipped_steps_have_the_bits_of_the_loop_outside(
    make: Any, arguments: Any, max_norm: float, of: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    assert_as_outside(make, of, arguments, clipping={"max_norm": max_norm})


def test_a_norm_of_nothing_is_torchs() -> None:
    assert_as_outside(Mlp, adamw, floats(16, 8), steps=4, clipping={"max_norm": 0})


class Mixed(nn.Module):
    """Parameters of two types, one that is used twice, one whose gradient others read, one that gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.idle = nn.Parameter(torch.ones(3))
        self.high = nn.Linear(8, 8)
        self.added = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.high(self.low(x.bfloat16()).float()) + self.added
        return self.high(torch.tanh(x)).square().mean()


def test_types_uses_and_missing_gradients() -> None:
    assert_as_outside(Mixed, adamw, floats(6, 8), steps=6, clipping={"max_norm": 0.05})


class Parted(nn.Module):
    """Two losses; what only one of them needs gets no gradient where it is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(x))
        return self.one(x).square().mean(), self.two(x).abs().mean()


def test_gradients_that_are_there_and_those_the_step_does_not_reach() -> None:
    """``two`` has a gradient of an accumulated call, and gets none in the last, whose loss does not need it."""

    def run(model: nn.Module, fit: bool) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if fit:
            ebbtide.fit(
                model, "100%", optimizer=optimizer, step="inside", progress=None, options=ebbtide.Options(max_norm=0.02)
            )
        torch.manual_seed(3)
        norms: list[Any] = []
        for _ in range(3):
            for micro in torch.randn(2, 6, 8):
                with ebbtide.no_update(model) if fit else torch.enable_grad():
                    torch.stack(model(micro)).sum().backward()
            model(torch.randn(6, 8))[0].backward()
            total = ebbtide.total_norm(model) if fit else clipper(model, max_norm=0.02)()
            assert total is not None
            norms.append(total.clone())
            optimizer.step()
            optimizer.zero_grad()
        return [*norms, *outcome(model, optimizer)]

    torch.manual_seed(0)
    model = Parted()
    assert_same(run(copy.deepcopy(model), True), run(model, False))


def fitted(model: nn.Module, max_norm: Any, budget: str | int = "100%") -> torch.optim.Optimizer:
    optimizer = adamw(model)
    ebbtide.fit(
        model, budget, optimizer=optimizer, step="inside", progress=None, options=ebbtide.Options(max_norm=max_norm)
    )
    return optimizer


def test_a_norm_that_is_no_number_spreads_as_in_torch() -> None:
    torch.manual_seed(0)
    model = Lora()
    optimizer = fitted(model, 1.0)
    model(torch.full((12, 16), float("inf"))).backward()
    optimizer.step()
    assert model.up.weight.isnan().all()


def test_a_backward_that_fails_before_its_norm_has_updated_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbtide.optimizer.in_step.backward_updates import BackwardUpdates

    torch.manual_seed(0)
    model = Lora()
    optimizer = fitted(model, 1.0)
    before = copy.deepcopy(model.state_dict())

    def fail(*_: object) -> Tensor:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(BackwardUpdates, "total_norm", fail)
        with pytest.raises(MemoryError):
            model(torch.randn(12, 16)).backward()
    assert_same(list(model.state_dict().values()), list(before.values()))
    model(torch.randn(12, 16)).backward()
    optimizer.step()


def test_who_clips_besides_is_told_what_to_do() -> None:
    model = Lora()
    optimizer = fitted(model, 1.0)
    assert ebbtide.total_norm(model) is None
    model(torch.randn(12, 16)).backward()
    with pytest.raises(UsageError, match=r"Take torch.nn.utils.clip_grad_norm_ out.*ebbtide.total_norm\(model\)"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    other = Lora()
    ebbtide.fit(other, "100%", optimizer=adamw(other), step="inside", progress=None)
    other(torch.randn(12, 16)).backward()
    with pytest.raises(UsageError, match=r"Leave it to the step to clip.*max_norm=.*clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    with pytest.raises(UsageError, match="fitted without max_norm"):
        ebbtide.total_norm(other)


@pytest.mark.parametrize("max_norm", ["1.0", True, -1.0, float("nan")])
def test_what_is_no_norm_is_refused(max_norm: Any) -> None:
    model = Lora()
    with pytest.raises(UsageError, match="max_norm"):
        ebbtide.fit(model, "100%", optimizer=adamw(model), step="inside", options=ebbtide.Options(max_norm=max_norm))


def test_max_norm_needs_the_optimizer_in_the_step_and_all_that_is_trained() -> None:
    model = Lora()
    with pytest.raises(UsageError, match=r'give step="inside"'):
        ebbtide.fit(model, "100%", optimizer=adamw(model), options=ebbtide.Options(max_norm=1.0))
    optimizer = torch.optim.SGD([model.up.weight], lr=0.1)
    ebbtide.fit(model, "100%", optimizer=optimizer, step="inside", progress=None, options=ebbtide.Options(max_norm=1.0))
    with pytest.raises(CaptureError, match=r"max_norm is of the gradients of all parameters, and down.weight gets one"):
        model(torch.randn(12, 16))


# -- gradients that are made twice ----------------------------------------------------------------------------


def passes_of(model: nn.Module) -> list[str]:
    """Names of what the plan makes in a gradient recompute pass."""
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert not check(plan.program, plan.schedule)
    return [op.name for op in plan.program.ops if op.name.startswith("again_")]


@pytest.mark.parametrize(("of", "rewrites"), [(momentum, "none"), (adamw, "exact")])
def test_a_budget_below_all_gradients_has_them_made_twice(of: Any, rewrites: str) -> None:
    """The allocator's own count of a whole step, from a step on in which the optimizer's state is there."""
    torch.manual_seed(0)
    x = torch.randn(8, 96)
    model = Deep()
    optimizer = of(model)
    weights = sum(each.nbytes for each in model.parameters())
    state = (2 if of is adamw else 1) * weights
    budget = weights + state + x.nbytes + int(0.55 * weights)
    clipping = {"max_norm": 0.01}
    model = assert_as_outside(Deep, of, floats(8, 96), budget, rewrites=rewrites, clipping=clipping)
    assert passes_of(model)
    step = ebbtide.step_of(model)
    assert step is not None
    assert step.verified_buffers >= len(passes_of(model))
    optimizer = FITTED[model].optimizers.declared
    assert optimizer is not None
    start = resident_bytes([model, optimizer, x])
    recorder = AllocationRecorder()
    recorder.start()
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()
    assert start + peak_above(recorder.stop()) <= budget


def small_gpt() -> nn.Module:
    return gpt(2, GPTConfig(vocabulary=64, length=16, layers=2, width=16, heads=2, dropout=0.1, tied=True)).model


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "gpt": (small_gpt, lambda: (torch.randint(64, (2, 16)), torch.randint(64, (2, 16)))),
    "mlp": (functools.partial(Mlp, width=96), floats(4, 8)),
    "tied": (Tied, tokens),
    "mixed": (Mixed, floats(6, 8)),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "optimizer"), [("gpt", adamw), ("mlp", momentum), ("tied", momentum), ("tied", adamw), ("mixed", adamw)]
)
def test_recompute_passes_have_the_bits_of_the_loop_outside(name: str, optimizer: Any) -> None:
    make, arguments = ZOO[name]
    torch.manual_seed(0)
    with pytest.raises(BudgetError) as refused:
        ebbtide.plan(
            make(),
            arguments(),
            budget=1,
            options=ebbtide.Options(optimizer=optimizer, step="inside", max_norm=1.0, effort=100, progress=None),
        )
    assert refused.value.smallest_bytes is not None
    budget = refused.value.smallest_bytes + 256
    model = assert_as_outside(make, optimizer, arguments, budget, steps=6, clipping={"max_norm": 0.1})
    # Where gradients are few, something else pins the least budget, and they may stay.
    assert passes_of(model) or name != "gpt"


# -- a gradient scaler ----------------------------------------------------------------------------------------


def test_a_scaler_that_scales_a_loss_is_refused_before_anything_is_updated() -> None:
    model = Lora()
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu")
    ebbtide.fit(model, "100%", optimizer=optimizer, step="inside", progress=None)
    before = copy.deepcopy(model.state_dict())
    loss = model(torch.randn(12, 16))
    with pytest.raises(UsageError, match=r"Take step=.outside.*Nothing has been updated"):
        scaler.scale([loss.detach(), loss * 2])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    other = torch.ones(1, requires_grad=True)
    assert scaler.scale(other).item() > 1  # of another loss
    torch.amp.GradScaler("cpu", enabled=False).scale(loss).backward()
    optimizer.step()
    ebbtide.unfit(model)
    scaler.scale(model(torch.randn(12, 16))).backward()
