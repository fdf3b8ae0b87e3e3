"""What a model keeps of a step with its graph is carried into the next one as in eager."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide


class Estimates(nn.Module):
    """A layer beside a buffer of its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.begun = False


class Codebook(Estimates):
    """Begun with data, and averaged without gradients from then on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        if not self.begun:
            self.seen.copy_(h.mean(0))
            self.begun = True
        loss = (h - self.seen.detach()).square().mean()
        with torch.no_grad():
            self.seen.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return loss


class Reassigned(Estimates):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        self.seen = 0.9 * self.seen + 0.1 * h.mean(0)
        return (h - self.seen.detach()).square().mean()


class InPlace(Estimates):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        self.seen.mul_(0.9).add_(0.1 * h.mean(0))
        return (h - self.seen.detach()).square().mean()


class Attribute(Estimates):
    """What the last step has seen, in an attribute of a part that is no buffer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        last = getattr(self.layer, "last", None)
        self.layer.last = h.mean(0)  # type: ignore[assignment]
        return h.square().mean() if last is None else (h - last.detach()).square().mean()


class Views(Estimates):
    """Normalized on the way, and read through a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        self.seen = nn.functional.normalize(self.seen * 0.5 + h.mean(0), dim=0).view(2, 4).view(8)
        with torch.no_grad():
            distance = self.seen.norm()
        return h.square().mean() * distance


class Read(Estimates):
    """The loss reads it, so that eager goes back through the graph of the last step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        self.seen = 0.9 * self.seen + 0.1 * h.mean(0)
        return (h - self.seen).square().mean()


def trained(model: nn.Module, steps: int = 4) -> list[Any]:
    found: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        found += [loss.detach().clone(), *(each.grad.clone() for each in model.parameters())]  # type: ignore[union-attr]
        found.append(model.seen.detach().clone())  # type: ignore[operator]
        optimizer.step()
    return found


@pytest.mark.parametrize("kind", [Codebook, Reassigned, InPlace, Attribute, Views])
def test_it_trains_as_eager_does(kind: type[Estimates]) -> None:
    torch.manual_seed(0)
    eager = kind()
    planned = ebbtide.fit(copy.deepcopy(eager), "1MiB", options=ebbtide.Options(effort=50))
    wanted = trained(eager)
    gc.collect()  # what that and earlier tests have left may go while a step of 500 bytes is measured
    for one, other in zip(wanted, trained(planned), strict=True):
        assert torch.equal(one, other)
    assert planned.seen.requires_grad == eager.seen.requires_grad


def test_what_the_loss_reads_says_what_eager_says() -> None:
    said: list[str] = []
    for model in (Read(), ebbtide.fit(Read(), "1MiB", options=ebbtide.Options(effort=50))):
        with pytest.raises(RuntimeError, match="backward through the graph a second time") as error:
            trained(model)
        said.append(str(error.value))
    assert said[0] == said[1]
