"""A step whose forward runs under another default type than its backward (Lightning's ``bf16-true``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebbtide


class Chain(nn.Module):
    """Dropout, and integers and factories whose results have the default type."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            kept = (x > 0) / 3
            x = x + F.dropout(F.gelu(layer(x)), 0.1) * kept.to(x.dtype) + torch.ones(32).to(x.dtype)
        return x.float().square().mean()


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("inside", "outside"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
def test_what_runs_again_has_the_type_that_it_had(inside: torch.dtype, outside: torch.dtype) -> None:
    def gradients(share: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Chain().to(inside)
        if share is not None:
            ebbtide.fit(model, share, progress=None)
        for _ in range(3):
            model.zero_grad()
            with default(inside):
                loss = model(torch.ones(64, 32, dtype=inside))
            with default(outside):
                loss.backward()
                assert torch.get_default_dtype() is outside
        if share is not None:
            plan = ebbtide.plan_of(model)
            assert plan is not None
            assert plan.predicted_peak_bytes < 0.9 * plan.baseline_peak_bytes
        return [each.grad for each in model.parameters() if each.grad is not None]

    for ours, theirs in zip(gradients("75%"), gradients(None), strict=True):
        assert torch.equal(ours, theirs)
