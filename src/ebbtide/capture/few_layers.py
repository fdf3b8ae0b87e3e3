"""A model with few of its layers, for what grows with their number in a regular way (``step.layers``).

Layers are *alike* if they have one class, parameters and buffers of the same shapes, and in each of their modules the
same attributes: equal ones, or whole numbers in arithmetic progression, as a layer's own number is. A window that some
of them have, a hook on one or a ``forward`` of its own makes them unlike. The first may be another: it is always there.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["RepeatedLayers", "repeated_layers"]

LEAST_LAYERS = 12
"""Fewer are captured in about the time that a part of them takes twice."""
_NUMBERS = re.compile(r"(\d+)")
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a module that are compared by :func:`_kind`."""


@dataclass(frozen=True)
class RepeatedLayers:
    """Layers of a model that are alike but for the first.

    Attributes:
        container: the module that has them.
    """

    container: nn.ModuleList | nn.Sequential

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.container)

    @contextmanager
    def first(self, count: int) -> Iterator[None]:
        """While open, the container has the first ``count`` alone; it is the same object."""
        layers: Any = self.container._modules
        self.container._modules = type(layers)(list(layers.items())[:count])
        try:
            yield
        finally:
            self.container._modules = layers


def repeated_layers(model: nn.Module) -> RepeatedLayers | None:
    """The longest list of them, if it is long enough to gain by it; ``None`` if there is none."""
    found = [
        each
        for each in model.modules()
        if isinstance(each, nn.ModuleList | nn.Sequential)
        and len(each) >= LEAST_LAYERS
        and _are_alike(list(each.children())[1:])
    ]
    longest = max(found, key=len, default=None)
    return None if longest is None else RepeatedLayers(longest)


def _are_alike(layers: Sequence[nn.Module]) -> bool:
    if len({*map(_kind, layers)}) > 1:
        return False
    return all(
        _have_one_state([vars(each) for each in same])
        for same in zip(*(each.modules() for each in layers), strict=True)
    )


def _kind(layer: nn.Module) -> Hashable:
    """Classes, and shapes of what they hold."""
    modules = tuple((name, type(each)) for name, each in layer.named_modules())
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return modules, tuple((name, each.shape, each.dtype, each.requires_grad) for name, each in tensors)


def _have_one_state(states: Sequence[dict[str, Any]]) -> bool:
    """Whether attributes are equal, or go on from one module to the next."""
    if any(each.keys() != states[0].keys() for each in states):
        return False
    return all(_go_on([each[name] for each in states]) for name in states[0] if name not in _TABLES)


def _go_on(values: Sequence[Any]) -> bool:
    """Whether they are equal, or numbers in arithmetic progression, alone, in text or in a dictionary."""
    first, kinds = values[0], {type(each) for each in values}
    if all(_same(first, each) for each in values):
        return True
    if kinds == {int}:
        return [*values] == [first + (values[1] - first) * position for position in range(len(values))]
    if kinds == {str}:
        parts = [_NUMBERS.split(each) for each in values]
        alike = all(each[::2] == parts[0][::2] for each in parts)
        return alike and all(
            _go_on([int(each) for each in numbers]) for numbers in zip(*(p[1::2] for p in parts), strict=True)
        )
    if kinds == {dict}:
        return _have_one_state(values)
    return False


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, torch.Tensor):
        return False
    try:
        return bool(one == other)
    except Exception:  # of somebody's class that is not compared
        return False
