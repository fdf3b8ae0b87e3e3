"""Sizes by which models are asked for: batch, layers, length and image, dtype and rank, each where a model has it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ebbtide.case import Case
from ebbtide.errors import UsageError

__all__ = ["parameters_of", "resized", "sized"]

_Config = TypeVar("_Config", bound=Any)
_NAMES = {
    "batch": "batch",
    "layers": "layers",
    "length": "length",
    "frames": "length",
    "image": "image",
    "dtype": "dtype",
    "lora": "lora",
}
"""What a model's function calls each."""


def parameters_of(model: Callable[..., Case]) -> dict[str, str]:
    """The sizes that ``model`` takes, the one that it is called with first: per size, its parameter's name."""
    return {_NAMES[each]: each for each in inspect.signature(model).parameters if each in _NAMES}


def sized(model: Callable[..., Case], label: str, size: int | None, sizes: Mapping[str, int | str]) -> Case:
    """The case that ``model`` makes.

    Args:
        model: its function.
        label: what users call it.
        size: its first; its own if ``None``.
        sizes: others by name.

    Raises:
        UsageError: for a size that it does not have, or has twice.
    """
    known = parameters_of(model)
    for each, value in sizes.items():
        if each not in known:
            raise UsageError(
                f"{label} has no {each} to choose; it takes: {', '.join(known)}",
                argument=each,
                value=value,
                accepted=tuple(known),
            )
    first = next(iter(known), "")
    if size is not None and first in sizes:
        raise UsageError(
            f"the size of {label} is its {first}, and both {size} and {sizes[first]} were given; give one of them",
            argument=first,
            value=sizes[first],
        )
    given = {known[each]: value for each, value in sizes.items()}
    return model(**given) if size is None else model(size, **given)


def resized(config: _Config, **sizes: int | None) -> _Config:
    """The dataclass ``config`` with those ``sizes`` that are not ``None``."""
    return replace(config, **{name: size for name, size in sizes.items() if size is not None})
