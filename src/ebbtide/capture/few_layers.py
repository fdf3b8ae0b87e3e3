"""A model with few of its layers, for what grows with their number in a regular way (``step.layers``)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

__all__ = ["RepeatedLayers", "repeated_layers"]

LEAST_LAYERS = 12
"""Fewer are captured in about the time that a part of them takes twice."""


@dataclass(frozen=True)
class RepeatedLayers:
    """Layers of a model that are alike but for the first and the last, called one after the other.

    Attributes:
        owner: the module that has them.
        name: as what.
        layers: all of them.
    """

    owner: nn.Module
    name: str
    layers: nn.ModuleList | nn.Sequential

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.layers)

    @contextmanager
    def first(self, count: int) -> Iterator[None]:
        """While open, the model has the first ``count`` alone."""
        setattr(self.owner, self.name, self.layers[:count])
        try:
            yield
        finally:
            setattr(self.owner, self.name, self.layers)


def repeated_layers(model: nn.Module) -> RepeatedLayers | None:
    """The longest list of them, if it is long enough to gain by it; ``None`` if there is none."""
    found = [
        RepeatedLayers(owner, name, child)
        for owner in model.modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) >= LEAST_LAYERS
    ]
    alike = [each for each in found if len({*map(_kind, [*each.layers][1:-1])}) == 1]
    return max(alike, key=lambda each: each.count, default=None)


def _kind(layer: nn.Module) -> Hashable:
    """What layers that are alike have in common."""
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return (
        type(layer),
        layer.training,
        tuple((name, each.shape, each.dtype, each.requires_grad) for name, each in tensors),
    )
