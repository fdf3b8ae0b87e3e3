"""Which output is the loss: decided by its name and by what it is computed from, and by nothing else."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebbtide
from ebbtide.capture.loss import loss_is_outside
from ebbtide.capture.offline import capture

X, Y = torch.randn(1, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([1])
Body = Callable[["Model", torch.Tensor, torch.Tensor], Any]
Pair = namedtuple("Pair", "loss logits")


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.trunk, self.logits, self.value = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.weights: torch.Tensor
        self.register_buffer("weights", torch.ones(3))
        self.body = body

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.body(self, torch.tanh(self.trunk(x)), y)


def ce(m: Model, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(m.logits(h), y)


LOSSES: dict[str, Body] = {
    "alone": ce,
    "first": lambda m, h, y: (ce(m, h, y), m.logits(h)),
    "last, of the logits": lambda m, h, y: (lambda z: (z, F.cross_entropy(z, y)))(m.logits(h)),
    "of all that is returned": lambda m, h, y: (lambda z: (z, h, (z.square().sum() + h.sum())))(m.logits(h)),
    "weighted": lambda m, h, y: (lambda z: (F.cross_entropy(z, z.argmax(-1), m.weights), z))(m.logits(h)),
    "reads labels": lambda m, h, y: (m.logits(h).softmax(-1), ce(m, h, y)),
    "named": lambda m, h, y: {"loss": m.value(h), "logits": m.logits(h)},
    "named field": lambda m, h, y: Pair(h.sum(), m.logits(h)),
    "total_loss": lambda m, h, y: {"total_loss": ce(m, h, y), "logits": m.logits(h)},
    "integer keys": lambda m, h, y: OrderedDict([(0, ce(m, h, y)), (1, m.logits(h))]),
    "two": lambda m, h, y: {"loss": ce(m, h, y), "scale": m.scale * 2, "logits": m.logits(h)},
}
NO_LOSSES: dict[str, Body] = {
    "value of a batch of one": lambda m, h, y: (m.logits(h), m.value(h)),
    "value, squeezed": lambda m, h, y: (m.logits(h), m.value(h).squeeze()),
    "value beside its features": lambda m, h, y: (m.value(h), h),
    "value beside its features, squeezed": lambda m, h, y: (m.value(h).squeeze(), h),
    "mean value beside its features": lambda m, h, y: (h, m.value(h).mean()),
    "named value": lambda m, h, y: {"value": m.value(h).squeeze(), "hidden": h},
    "scale of logits": lambda m, h, y: (h, m.logits(h), m.scale.exp()),
    "the scale itself": lambda m, h, y: (h, m.scale),
    "auxiliary loss": lambda m, h, y: {"logits": m.logits(h), "aux_loss": h.square().mean(), "router": h},
    "no name and nothing read": lambda m, h, y: (m.logits(h), m.value(h).mean(), m.trunk.weight.norm()),
}


def tangents(body: Body) -> list[int]:
    joint = capture(Model(body), (X, Y), {}, name="roles", granularity_bytes=1, context={})
    assert loss_is_outside(joint) == any(node.meta["val"].numel() > 1 for node in joint.tangents)
    return sorted(node.meta["val"].numel() for node in joint.tangents)


@pytest.mark.parametrize("name", LOSSES)
def test_beside_a_loss_nothing_larger_takes_a_gradient(name: str) -> None:
    assert set(tangents(LOSSES[name])) == {1}


@pytest.mark.parametrize("name", NO_LOSSES)
def test_without_a_loss_every_output_takes_a_gradient(name: str) -> None:
    assert max(tangents(NO_LOSSES[name])) > 1


def test_outputs_without_a_loss_train_as_in_eager() -> None:
    """Actor and critic with a batch of one, whose loss is outside."""
    torch.manual_seed(0)
    model = Model(lambda m, h, y: {"logits": m.logits(h), "value": m.value(h).squeeze()})
    twin = Model(model.body)
    twin.load_state_dict(model.state_dict())
    ebbtide.fit(model, "1GiB")
    for _ in range(3):
        for each in (model, twin):
            each.zero_grad()
            found = each(X, Y)
            (F.cross_entropy(found["logits"], Y) + (found["value"] - 1).square()).backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert (mine.grad is None and theirs.grad is None) or torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
