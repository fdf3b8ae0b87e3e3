"""What an optimizer is told: options in its groups and in its attributes, read for three purposes.

1. To make another one: :func:`options_of` a group, and what :func:`is_option` among the attributes.
2. To know whether a step takes as many bytes as before: :func:`settings_of`, in which numbers are 0 or not.
3. To see whether somebody has changed one: :func:`attributes_of`, values themselves.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

import torch

from ebbtide.measurement.resident import tensors_in

__all__ = ["attributes_of", "is_option", "is_plain", "options_of", "settings_of"]

_RATE = "lr"  # schedules begin at 0
_SETTINGS = (bool, int, float, str, tuple, type(None))  # not `bool | ...`, which is made anew for every value


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """What a trial of an optimizer is made with in place of ``group``, besides parameters; nothing that it changes."""
    given: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, list | dict | set):
            if key != "params" and not any(True for _ in tensors_in(value)):
                with suppress(Exception):  # of what cannot be copied, such as a lock, the constructor has another
                    given[key] = copy.deepcopy(value)
        else:
            given[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return given


def settings_of(options: Mapping[str, Any]) -> tuple[tuple[str, object], ...]:
    """What of a group's options an update's bytes depend on: flags such as amsgrad, whether there is a momentum.

    Of a number that is whether it is 0; numbers may count steps.
    """
    plain = [(name, value) for name, value in options.items() if isinstance(value, _SETTINGS) and name != _RATE]
    return tuple([(name, _said(value)) for name, value in plain])


def _said(value: object) -> object:
    if isinstance(value, tuple):  # betas
        return tuple(map(_said, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return value if value is None or isinstance(value, (bool, str)) else bool(value)


def is_option(value: object, depth: int = 4) -> bool:
    """Whether it is a function that holds nothing, or a dictionary of such and of plain values, by names."""
    if isinstance(value, dict):
        return depth > 0 and all(isinstance(key, str) and is_option(each, depth - 1) for key, each in value.items())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(value, types.FunctionType):
        return not value.__closure__
    return is_plain(value) or isinstance(value, types.BuiltinFunctionType)


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What of an optimizer's public attributes is plain, but for whole numbers: somebody may count there."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name[:1] != "_" and is_plain(value) and (isinstance(value, bool) or not isinstance(value, int))
    }


def is_plain(value: object) -> bool:
    """Whether it is an immutable value without tensors."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | Enum | torch.dtype)
