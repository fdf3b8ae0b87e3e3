"""NumPy's numbers in a forward: results have eager's types and bits, and what could differ is refused at its line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.errors import CaptureError


class Model(nn.Module):
    """A layer, a number without dimensions, and numbers of NumPy's."""

    def __init__(self, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(32, 32), loss
        self.scale = nn.Parameter(torch.tensor(0.1))
        self.weight, self.power, self.several = np.float64(0.3), np.float64(3.0), list(np.linspace(0.1, 1, 3))
        self.array = np.linspace(0.1, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self, x)

    def mean(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def typed(loss: Tensor) -> Tensor:
    return loss * 2 if loss.dtype == torch.float32 else loss * 3


def one_type(model: Any, x: Tensor) -> torch.dtype:
    return (model.mean(x) / np.sqrt(32)).dtype


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * np.float64(0.3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * np.float64(0.3)


class Bent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * torch.from_numpy(np.cos(x.numpy()))


class Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.weight, None


PLANNED: dict[str, Callable[[Any, Tensor], Any]] = {
    "a root": lambda model, x: model.mean(x) / np.sqrt(32),
    "a logarithm": lambda model, x: model.mean(x) + model.scale + 0.5 * np.log(2 * np.pi),
    "from the left": lambda model, x: np.float64(0.3) * model.mean(x),
    "an attribute": lambda model, x: model.mean(x) * model.weight,
    "a list": lambda model, x: sum((w * model.mean(x + i) for i, w in enumerate(model.several)), start=model.scale),
    "a power": lambda model, x: model.mean(x.abs() ** model.power) ** np.float64(0.5),
    "a comparison": lambda model, x: model.mean(x) * (model.scale > np.float64(0.1)).float() + model.mean(-x),
    "integers": lambda model, x: model.mean(x + (torch.arange(32) * np.float64(0.1) / np.sqrt(7))),
    "several": lambda model, x: model.mean(x) * (0.5 * (1 + np.cos(np.pi * 0.3)) - np.float32(0.1)),
    "the larger": lambda model, x: model.mean(x) * max(np.float64(0.1), 0.2),
    "NumPy's power": lambda model, x: model.mean(x) * np.float64(2.0) ** -3,
    "a size": lambda model, x: model.mean(x) / np.prod([8, 32]),
    "a tensor": lambda model, x: (model.mean(x) * torch.as_tensor(np.float64(0.3))).float(),
    "half": lambda model, x: model.mean(x).bfloat16() * np.float64(0.3) + np.float32(0.1),
    "a type read": lambda model, x: typed(model.mean(x) * model.weight),
    "a type taken": lambda model, x: model.mean(x) * model.weight * torch.ones((), dtype=one_type(model, x)),
    "a Python number": lambda model, x: model.mean(x) * (model.weight if isinstance(model.weight, float) else 7),
    "an array of its type": lambda model, x: model.mean(x * torch.from_numpy(x.detach().numpy() * np.float32(0.3))),
    "a truth": lambda model, x: model.mean(x) * (2 if model.weight > 0.2 else 7) * (model.weight < 0.5),
    "its type": lambda model, x: model.mean(x) * (2 if model.weight.dtype == np.float64 else 7),
    "its method": lambda model, x: model.mean(x) * model.weight.astype(np.float32).item() * model.weight.real,
    "rounded": lambda model, x: model.mean(x) * round(model.weight, 1) * int(model.power) * float(np.sqrt(5)),
    "a list of tensors": lambda model, x: (torch.tensor(model.several) * model.mean(x)).sum().float(),
    "a range": lambda model, x: sum((model.mean(x) * i for i in range(np.int64(3))), start=model.scale),
    "given to a function": lambda model, x: Weighted.apply(model.mean(x), model.weight),  # pyright: ignore
    "a function": lambda model, x: Scaled.apply(model.mean(Scaled.apply(x))),  # pyright: ignore
}
REFUSED: dict[str, Callable[[Any, Tensor], Any]] = {
    "an array's": lambda model, x: model.mean(x) * model.array[1],
    "a loop's": lambda model, x: sum((model.mean(x) * each for each in model.array), start=model.scale),
    "computed": lambda model, x: model.mean(x) * x.numpy().astype(np.float64).max(),
    "compared": lambda model, x: model.mean(x) * (model.scale > x.numpy().max()).float(),
    "in a backward": lambda model, x: model.mean(Bent.apply(x)),  # pyright: ignore
    "of an array": lambda model, x: model.mean(x * torch.from_numpy(x.numpy() * model.weight)).float(),
}


def trained(model: nn.Module) -> list[Tensor]:
    """Losses and gradients of three steps."""
    found: list[Tensor] = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randn(8, 32).requires_grad_())
        loss.backward()
        found += [loss.detach()] + [each.grad.clone() for each in model.parameters() if each.grad is not None]
        model.zero_grad()
    return found


@pytest.mark.parametrize("loss", PLANNED.values(), ids=PLANNED)
def test_results_have_eagers_types_and_bits(loss: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    eager = Model(loss)
    fitted = ebbtide.fit(copy.deepcopy(eager), "1GiB")
    for mine, theirs in zip(trained(fitted), trained(eager), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("loss", REFUSED.values(), ids=REFUSED)
def test_what_could_differ_is_refused_at_its_line(loss: Callable[[Any, Tensor], Tensor]) -> None:
    x = torch.randn(8, 32, requires_grad=loss is REFUSED["in a backward"])
    with pytest.raises(CaptureError, match="NumPy") as raised:
        ebbtide.fit(Model(loss), "1GiB")(x)
    assert str(raised.value.source).startswith("test_numpy_numbers.py:")


def test_a_number_that_changes_is_of_its_step() -> None:
    """Each value is a constant of its own capture, as Python's numbers are."""
    eager = Model(PLANNED["an attribute"])
    fitted = ebbtide.fit(copy.deepcopy(eager), "1GiB")
    x = torch.randn(8, 32)
    for weight in (0.3, 0.7, 0.3):
        eager.weight = fitted.weight = np.float64(weight)
        assert torch.equal(fitted(x), eager(x))
