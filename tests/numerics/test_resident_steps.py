"""What is resident at a step's start, whatever object holds it: counted once each, and within the budget."""

from __future__ import annotations

import dataclasses
import gc
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.measurement.leftovers import LOOKED_AT
from ebbtide.torch_seams.storages import StorageWatch

ROWS, WIDTH = 256, 64
BATCH = ROWS * WIDTH * 4  # bytes


@pytest.fixture(autouse=True)
def _nothing_left_of_other_tests() -> None:
    gc.collect()


class Tower(nn.Module):
    """Returns the loss beside what it was made of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.rows(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean(), x

    def rows(self, x: Any) -> torch.Tensor:
        return x


def resident(model: nn.Module) -> int:
    plan = ebbtide.plan_of(model)
    assert plan is not None
    return plan.resident_bytes


def parameters(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Fields:
    x: torch.Tensor
    unused: int = 0


@pytest.mark.parametrize("kind", ["dataclass", "user dictionary"])
def test_a_batch_in_an_object_counts(kind: str) -> None:
    class Model(Tower):
        def rows(self, x: Any) -> torch.Tensor:
            return x.x if isinstance(x, Fields) else x["x"]

    model = ebbtide.fit(Model(), "1GiB", options=ebbtide.Options(effort=100))
    model(Fields(rows()) if kind == "dataclass" else UserDict(x=rows()))[0].backward()
    assert resident(model) == parameters(model) + BATCH


def test_a_tensor_that_is_a_plain_attribute_and_a_teacher_in_a_list_count() -> None:
    class Model(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.plain = [torch.randn(WIDTH, WIDTH)]
            self.teacher = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

        def rows(self, x: Any) -> torch.Tensor:
            return self.teacher[0](x @ self.plain[0])

    model = ebbtide.fit(Model(), "1GiB", options=ebbtide.Options(effort=100))
    model(rows())[0].backward()
    teacher = parameters(model.teacher[0])  # type: ignore[index, arg-type]
    assert resident(model) == parameters(model) + BATCH + WIDTH * WIDTH * 4 + teacher


def test_outputs_of_the_last_call_are_resident_while_somebody_has_them() -> None:
    model = Tower()
    tight = ebbtide.plan(Tower(), (rows(),), budget="1000%").smallest_bytes + parameters(model) + BATCH + 10_000
    ebbtide.fit(model, tight, options=ebbtide.Options(effort=500))
    out: Any = None
    for seed in range(4):
        x = rows(seed)
        held = [] if out is None else [out[1].detach()]
        if seed < 2:  # ops are timed and plans are made, which no measurement may be around
            out = model(x)
            out[0].backward()
        else:
            with ebbtide.measure(model, x, held) as gauge:
                del held
                out = model(x)
                out[0].backward()
            assert gauge.peak_bytes <= tight, seed
        assert resident(model) >= parameters(model) + (BATCH if seed == 0 else 2 * BATCH)


def test_an_output_that_is_dropped_is_not() -> None:
    model = ebbtide.fit(Tower(), "1GiB", options=ebbtide.Options(effort=100))
    for seed in range(3):
        model.zero_grad()
        model(rows(seed))[0].backward()
    ebbtide.set_budget(model, "2GiB")  # planned anew, with what is resident now
    model.zero_grad()
    model(rows())[0].backward()
    assert resident(model) == parameters(model) + BATCH


@pytest.mark.filterwarnings("ignore:another forward of this model is in flight")
def test_what_another_models_step_in_flight_keeps_counts() -> None:
    first, second = (
        ebbtide.fit(Tower(), "1GiB", options=ebbtide.Options(effort=100)),
        ebbtide.fit(Tower(), "1GiB", options=ebbtide.Options(effort=100)),
    )
    loss, _ = first(rows())
    second(rows())[0].backward()
    plan = ebbtide.plan_of(first)
    assert plan is not None
    # Of the first, its batch is saved for the backward as well.
    assert resident(second) == parameters(second) + 2 * BATCH + plan.boundary_bytes
    loss.backward()


def test_collected_losses_count_and_do_not_slow_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).square().mean()

    model, losses, x = ebbtide.fit(Small(), "1GiB", options=ebbtide.Options(effort=10)), [], torch.randn(2, 4)
    looked: list[int] = []
    honest = StorageWatch.alive.fget
    assert honest is not None
    monkeypatch.setattr(StorageWatch, "alive", property(lambda watch: (looked.append(1), honest(watch))[1]))
    work: list[int] = []
    for _ in range(300):
        losses.append(model(x))
        losses[-1].backward()
        work.append(len(looked))
        looked.clear()
    assert max(work[-50:]) <= LOOKED_AT + 8
    ebbtide.set_budget(model, "2GiB")
    model(x).backward()
    before = resident(model)
    losses.clear()
    ebbtide.set_budget(model, "3GiB")
    model(x).backward()
    assert before - resident(model) == 300 * 4


def test_gradients_of_a_module_in_a_list_count() -> None:
    class Model(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.Linear(WIDTH, WIDTH)]

        def rows(self, x: Any) -> torch.Tensor:
            return self.hidden[0](x)

    model = ebbtide.fit(Model(), "1GiB", options=ebbtide.Options(effort=100))
    hidden = parameters(model.hidden[0])  # type: ignore[index, arg-type]
    for _ in range(2):
        model(rows())[0].backward()
    ebbtide.set_budget(model, "2GiB")
    model(rows())[0].backward()
    assert resident(model) == 2 * parameters(model) + BATCH + 2 * hidden


def test_what_a_retained_graph_keeps_counts() -> None:
    model = ebbtide.fit(Tower(), "1GiB", options=ebbtide.Options(effort=100))
    kept = model(rows())[0]
    kept.backward(retain_graph=True)
    plan = ebbtide.plan_of(model)
    assert plan is not None
    for budget, retained in (("2GiB", plan.boundary_bytes), ("3GiB", 0)):
        ebbtide.set_budget(model, budget)
        model.zero_grad()
        model(rows())[0].backward()
        # Its own batch is saved as well, and the loss that is kept is a few bytes.
        most = parameters(model) + BATCH + retained + (BATCH if retained else 0) + 64
        assert parameters(model) + BATCH + retained <= resident(model) <= most
        if retained:
            kept.backward()


def test_a_decoder_that_reads_an_encoders_output_counts_it_once() -> None:
    encoder, decoder = (
        ebbtide.fit(Tower(), "1GiB", options=ebbtide.Options(effort=100)),
        ebbtide.fit(Tower(), "1GiB", options=ebbtide.Options(effort=100)),
    )
    _, hidden = encoder(rows())
    hidden = hidden.detach()
    del _
    decoder(hidden)[0].backward()
    assert resident(decoder) == parameters(decoder) + BATCH


def _of_the_input(loss: torch.Tensor, x: torch.Tensor, model: nn.Module) -> object:
    loss.backward()
    return x.grad


def _asked_for(loss: torch.Tensor, x: torch.Tensor, model: nn.Module) -> object:
    return torch.autograd.grad(loss, x)


def _of_all_parameters(loss: torch.Tensor, x: torch.Tensor, model: nn.Module) -> object:
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("read", [_of_the_input, _asked_for, _of_all_parameters])
def test_gradients_that_a_loop_keeps_are_resident(read: Any) -> None:
    """Adversarial training, gradient surgery: at no parameter, and of a planned backward."""
    model = ebbtide.fit(Tower(), "1GiB", options=ebbtide.Options(effort=100))
    x = rows().requires_grad_()
    gradients = read(model(x)[0], x, model)
    model.zero_grad()
    model(rows(1))[0].backward()
    made = parameters(model) if read is _of_all_parameters else BATCH
    assert resident(model) == parameters(model) + 2 * BATCH + made
    del gradients, x
    model.zero_grad()
    ebbtide.set_budget(model, "2GiB")
    model(rows(1))[0].backward()
    assert resident(model) == parameters(model) + BATCH


def test_a_gradient_of_a_tensor_in_a_closure_counts_once() -> None:
    class Model(Tower):
        def rows(self, x: Any) -> torch.Tensor:
            return x + prompt

    prompt = torch.zeros(ROWS, WIDTH, requires_grad=True)
    model = ebbtide.fit(Model(), "1GiB", options=ebbtide.Options(effort=100))
    for seed in range(2):
        model.zero_grad()
        model(rows(seed))[0].backward()
    ebbtide.set_budget(model, "2GiB")
    model.zero_grad()
    model(rows())[0].backward()
    assert resident(model) == parameters(model) + 3 * BATCH
