"""What a ``torch.autograd.Function`` takes off its context in the backward leaves the step one graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide


class Freed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.y = x.exp()
        return ctx.y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        result = gradients[0] * ctx.y
        del ctx.y
        return result


class Several(torch.autograd.Function):
    """One of two at the end, one on the way, by ``delattr``; one is put back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.scratch = x.sin()
        ctx.x, ctx.scale = x, 2.0
        result = ctx.scratch * ctx.scale
        del ctx.scratch
        ctx.scratch = x.cos()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        x, factor = ctx.x, ctx.scratch
        delattr(ctx, "x")
        del ctx.scratch
        return gradients[0] * factor * ctx.scale + 0 * x


class Model(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(self.layer(x)).sum()


@pytest.mark.parametrize("function", [Freed, Several])
def test_it_is_planned_with_the_bits_of_eager(function: Any) -> None:
    torch.manual_seed(0)
    eager = Model(function)
    planned = ebbtide.fit(copy.deepcopy(eager), "1MiB", options=ebbtide.Options(effort=50))
    x = torch.randn(3, 8)
    for model in (eager, planned):
        model(x).backward()
    assert torch.equal(eager.layer.weight.grad, planned.layer.weight.grad)  # type: ignore[arg-type]
