"""How often a fitted model is captured while it trains: gradient accumulation, and a frozen half as in a GAN.

Dynamo counts the graphs that it hands to its compiler, whatever the code under test calls them. Public names alone
are used, so that any version can be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

import ebbtide
from harness.record import Row, at_most

__all__ = ["accumulating", "count", "rows", "toggling"]

TITLE = "Captures of one model while it trains"
ACCUMULATED, TOGGLED = 8, 20
MOST_ACCUMULATED, MOST_TOGGLED = 1, 2


class _Chain(nn.Module):
    def __init__(self, width: int = 32, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


def _fitted() -> nn.Module:
    torch.manual_seed(0)
    return ebbtide.fit(_Chain(), "512KiB", options=ebbtide.Options(effort=200))


def accumulating(steps: int = ACCUMULATED) -> None:
    """Backward after backward with no zeroing between: from the second on, gradients are resident."""
    model, x = _fitted(), torch.randn(256, 32)
    for _ in range(steps):
        model(x).backward()
    assert all(p.grad is not None for p in model.parameters())


def toggling(steps: int = TOGGLED) -> None:
    """A discriminator: trained in one step, frozen in the next, in which only its input takes a gradient."""
    model = _fitted()
    for step in range(steps):
        frozen = bool(step % 2)
        model.requires_grad_(not frozen)
        model.zero_grad()
        x = torch.randn(256, 32, requires_grad=frozen)
        model(x).backward()
        assert (x.grad is not None) == frozen


def count(run: Callable[[], None]) -> int:
    """Graphs that Dynamo captured while ``run`` ran."""
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    run()
    return counters["stats"]["unique_graphs"] - before


def rows() -> Iterator[Row]:
    torch.set_num_threads(1)
    for name, run, most in (
        (f"gradient accumulation over {ACCUMULATED} steps", accumulating, MOST_ACCUMULATED),
        (f"requires_grad toggled over {TOGGLED} steps", toggling, MOST_TOGGLED),
    ):
        found = count(run)
        yield Row("captures", {"case": name, "captures": found}, (at_most("captures", found, most),))
