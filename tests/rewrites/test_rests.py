"""Elementwise ops that give a number other bits at the end of a slice than within it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ebbtide._api.estimate import capture_program
from ebbtide.rewrites.sliced.calls import calls_of
from ebbtide.rewrites.sliced.facts import slice_facts
from ebbtide.rewrites.sliced.feed_forward import FeedForward
from ebbtide.rewrites.sliced.regions import find_regions


class Gated(nn.Module):
    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.down = nn.Linear(16, width), nn.Linear(16, width), nn.Linear(width, 16)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.one(x)) * self.other(x)).square().mean()


def holds(activation: nn.Module, width: int, fact: str) -> bool:
    """Whether the facts that begin so hold, by 64 at a time of 97 rows of ``width`` columns."""
    step = capture_program(Gated(width, activation), (torch.randn(97, 16),), {})[0]
    (region,) = find_regions(step, FeedForward)[0]
    known = [each for call in calls_of(region) for each in slice_facts(call, 64)]
    own = [each for each in known if each.signature.startswith(fact)]
    assert own, [each.signature for each in known]
    return all(each.holds() for each in own)


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), nn.GELU("tanh")], ids=str)
@pytest.mark.parametrize("way", ["", "_backward"])
def test_columns_that_fill_no_vector_are_not_cut(activation: nn.Module, way: str) -> None:
    """So few numbers are in the rests that made-up ones agree by chance; those of a later step would not."""
    name = f"{'silu' if isinstance(activation, nn.SiLU) else 'gelu'}{way}"
    assert not holds(activation, 197, f"{name} by columns")
    assert holds(activation, 192, f"{name} by columns")


def test_slices_of_rows_have_the_rest_that_the_whole_has() -> None:
    assert holds(nn.SiLU(), 197, "silu by rows")


def test_an_op_that_computes_each_number_alike_may_have_rests() -> None:
    assert holds(nn.ReLU(), 197, "relu by columns")
