"""Reentrant checkpoints over data alone train nothing in them, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import ebbtide
from ebbtide.errors import CaptureError


class Model(nn.Module):
    """An encoder below a checkpoint, and a decoder on top."""

    def __init__(self, call: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call
        self.embed, self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def pair(self, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, list[Any]]:
        return self.encoder(x), [scale * self.embed(x), None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.call(self, x)).square().sum()


def of_pair(model: Model, x: torch.Tensor) -> torch.Tensor:
    one, (other, _) = checkpoint(model.pair, x, 2.0, use_reentrant=True)
    return one + other


CALLS: dict[str, Callable[[Model, torch.Tensor], torch.Tensor]] = {
    "data": lambda m, x: checkpoint(m.encoder, x, use_reentrant=True),
    "a default": lambda m, x: checkpoint(m.encoder, x),
    "what was embedded": lambda m, x: checkpoint(m.encoder, m.embed(x), use_reentrant=True),
    "not reentrant": lambda m, x: checkpoint(m.encoder, x, use_reentrant=False),
    "tuples": of_pair,
    "a sequence": lambda m, x: checkpoint_sequential(m.blocks, 2, x, use_reentrant=True),
    "beside another way": lambda m, x: checkpoint(m.encoder, x.detach(), use_reentrant=True) + m.embed(x),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_gradients_are_those_of_eager(name: str) -> None:
    torch.manual_seed(0)
    eager = Model(CALLS[name])
    planned = ebbtide.fit(copy.deepcopy(eager), "1MiB", options=ebbtide.Options(effort=50))
    x = torch.randn(3, 8)
    for _ in range(2):
        for model in (eager, planned):
            model(x).backward()
        for (of, one), other in zip(eager.named_parameters(), planned.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), of
            assert one.grad is None or torch.equal(one.grad, other.grad), of  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_what_returns_a_dictionary_is_refused_with_what_works() -> None:
    def call(model: Model, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda each: {"y": model.encoder(each)}, x, use_reentrant=True)["y"]

    model = ebbtide.fit(Model(call), "1MiB", options=ebbtide.Options(effort=50))
    with pytest.raises(CaptureError, match="use_reentrant=False"):
        model(torch.randn(3, 8))
