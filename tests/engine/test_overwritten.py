"""Tensors of a step that are written to in place: fine between steps, and blamed rightly inside of one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import CaptureError


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        given = torch.ones(1024, 16)
        if kind == "buffer":
            self.register_buffer("given", given)
        else:
            self.given = given

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        h = torch.tanh(self.given if x is None else x)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h.square().mean()


@pytest.mark.parametrize("kind", ["argument", "buffer", "attribute"])
def test_a_static_tensor(kind: str) -> None:
    model, twin = Model(kind), Model(kind)
    twin.load_state_dict(model.state_dict())
    ebbtide.fit(model, "75%")
    static = torch.empty(1024, 16)
    for _ in range(3):
        fresh = torch.randn(1024, 16)
        static.copy_(fresh)
        for each in (model, twin):
            each.zero_grad()
            each.given.copy_(fresh)
            loss = each(static) if kind == "argument" else each()
            loss.backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    loss = model(static) if kind == "argument" else model()
    (static if kind == "argument" else model.given).zero_()
    model.zero_grad()
    with pytest.raises(CaptureError, match=r"FloatTensor \[1024, 16\].*inplace operation between"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
