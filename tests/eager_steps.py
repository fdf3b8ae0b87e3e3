"""The oracle of most tests of bits: a few training steps of a deep copy that nobody fitted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ebbtide

__all__ = ["assert_trains_as_eager", "history"]


def history(model: nn.Module, arguments: Callable[[], tuple[Any, ...]], steps: int = 3) -> list[torch.Tensor | None]:
    """Losses and gradients of a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(2)
    found: list[torch.Tensor | None] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*arguments())
        loss.backward()
        found += [loss.detach().clone(), *(p.grad if p.grad is None else p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return [*found, torch.get_rng_state()]


def assert_trains_as_eager(model: nn.Module, arguments: Callable[[], tuple[Any, ...]]) -> nn.Module:
    """Fit ``model``: three planned steps have the losses, gradients and random state of a copy's in eager."""
    expected = history(copy.deepcopy(model), arguments)
    found = history(ebbtide.fit(model, "1GiB"), arguments)
    assert ebbtide.calls_of(model).planned == 3
    assert not ebbtide.calls_of(model).unplanned
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)  # type: ignore[arg-type]
    return model
