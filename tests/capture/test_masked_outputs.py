"""Norms and convolutions whose input needs no gradient: their backward makes fewer results, and that is what counts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import UsageError


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(requires_grad=False)


ROWS, IMAGES = (16, 8), (4, 8, 6, 6)
FIRST: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm": (lambda: nn.BatchNorm1d(8), ROWS),
    "batch norm in evaluation": (lambda: nn.BatchNorm1d(8).eval(), ROWS),
    "batch norm without statistics": (lambda: nn.BatchNorm1d(8, track_running_stats=False), ROWS),
    "batch norm of images": (lambda: nn.BatchNorm2d(8), IMAGES),
    "behind a frozen layer": (lambda: nn.Sequential(frozen(nn.Linear(8, 8)), nn.BatchNorm1d(8)), ROWS),
    "behind a frozen convolution": (lambda: nn.Sequential(frozen(nn.Conv2d(8, 8, 3)), nn.BatchNorm2d(8)), IMAGES),
    "instance norm": (lambda: nn.InstanceNorm2d(8, affine=True), IMAGES),
    "layer norm": (lambda: nn.LayerNorm(8), ROWS),
    "group norm": (lambda: nn.GroupNorm(2, 8), IMAGES),
    "convolution": (lambda: nn.Conv2d(8, 8, 3), IMAGES),
    "transposed convolution": (lambda: nn.ConvTranspose2d(8, 8, 3), IMAGES),
}


class Net(nn.Module):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.scale = first, nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x)) * self.scale
        return (y.square() + torch.sigmoid(y)).mean()


@pytest.mark.parametrize("name", FIRST)
def test_the_first_layer_is_planned_with_eagers_bits(name: str) -> None:
    make, shape = FIRST[name]
    torch.manual_seed(0)
    model, x = Net(make()), torch.randn(shape)
    eager = copy.deepcopy(model)
    eager(x).backward()
    ebbtide.fit(model, "1GiB", progress=None)
    model(x).backward()
    assert ebbtide.calls_of(model).planned == 1
    for (key, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), key
        assert ours.grad is None or theirs.grad is None or torch.equal(ours.grad, theirs.grad), key
    for ours, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_result_that_is_not_made_takes_no_bytes() -> None:
    x = torch.randn(1000, 8)
    plan = ebbtide.plan(
        Net(nn.BatchNorm1d(8)), (x,), budget="1GiB", machine="v100-16gb", options=ebbtide.Options(progress=None)
    )
    [backward] = [op for op in plan.program.ops if "batch_norm_backward" in op.target]
    assert [plan.program.buffers[b].bytes for b in backward.outputs] == [512, 512]


def test_modules_without_shapes_are_refused_ahead_of_time_too() -> None:
    for ask in (ebbtide.plan, ebbtide.doctor):
        with pytest.raises(UsageError, match=r"parameter first\.weight has no shape before the first batch"):
            ask(Net(nn.LazyLinear(8)), (torch.randn(4, 8),), budget="1GiB", options=ebbtide.Options(progress=None))
