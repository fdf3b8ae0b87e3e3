"""Sizes by which the zoo's models are asked for: batch, layers, length and image, each where a model has it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ebbtide.case import Case

__all__ = ["parameters_of", "resized"]

_Config = TypeVar("_Config", bound=Any)
_NAMES = {"batch": "batch", "layers": "layers", "length": "length", "frames": "length", "image": "image"}
"""What a model's function calls each."""


def parameters_of(model: Callable[..., Case]) -> dict[str, str]:
    """The sizes that ``model`` takes, the one that it is called with first: per size, its parameter's name."""
    return {_NAMES[each]: each for each in inspect.signature(model).parameters if each in _NAMES}


def resized(config: _Config, **sizes: int | None) -> _Config:
    """The dataclass ``config`` with those ``sizes`` that are not ``None``."""
    return replace(config, **{name: size for name, size in sizes.items() if size is not None})
