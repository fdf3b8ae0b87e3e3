"""The options of an optimizer, which are in its groups and in its attributes.

1. To make another one they are copied: :func:`options_of` a group, and of attributes what :func:`is_option`.
2. To see whether somebody has changed one they are compared by value: :func:`values_of`.
3. What a step takes depends on some of them, and of numbers on whether they are 0: :func:`settings_of`.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import torch

from ebbtide.measurement.resident import tensors_in
from ebbtide.torch_seams.storages import version_of
from ebbtide.user_objects import builtin_of, elements_of, is_a

__all__ = ["is_option", "is_plain", "options_of", "settings_of", "values_of"]

_RATE = "lr"  # schedules begin at 0
_SETTINGS = (bool, int, float, str, tuple, type(None))  # not `bool | ...`, which is made anew for every value


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the options of a group, without parameters and whatever holds tensors."""
    copies: dict[str, Any] = {}
    for key, value in group.items():
        if is_a(value, list, dict, set):
            if key != "params" and not any(True for _ in tensors_in(value)):
                with suppress(Exception):  # of what cannot be copied, such as a lock, the constructor has another
                    copies[key] = copy.deepcopy(value)
        else:
            copies[key] = value.detach().clone() if is_a(value, torch.Tensor) else value
    return copies


def settings_of(*options: Mapping[str, Any]) -> tuple[object, ...]:
    """What the bytes of a step depend on: flags such as amsgrad, whether there is a momentum.

    Args:
        options: groups, or attributes; numbers among them may count steps.
    """
    plain = [pair for each in options for pair in each.items() if is_a(pair[1], *_SETTINGS) and pair[0] != _RATE]
    return tuple([(name, _setting(value)) for name, value in plain])


def _setting(value: object) -> object:
    if is_a(value, tuple):  # betas
        return tuple(map(_setting, tuple.__iter__(value)))
    bare = builtin_of(value)
    return bare if bare is None or isinstance(bare, bool | str) else bool(bare)


def values_of(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Options by value: those of each group (of its own if ``None``), then those in public attributes.

    Of attributes that is what is plain, but for whole numbers: somebody may count there.
    """
    groups = optimizer.param_groups if groups is None else groups
    own = {name: value for name, value in vars(optimizer).items() if name[:1] != "_" and is_plain(value)}
    counted = [name for name, value in own.items() if is_a(value, int) and not is_a(value, bool)]
    values = [{name: value_of(value) for name, value in group.items() if name != "params"} for group in groups]
    return [*values, {name: value for name, value in own.items() if name not in counted}]


def value_of(value: Any) -> Any:
    """Something that equals another such if nothing has changed: of a tensor which one, and how often written to."""
    if is_a(value, torch.Tensor):
        return id(value), version_of(value)
    if is_a(value, dict):
        return {key: value_of(each) for key, each in dict.items(value)}
    if (found := elements_of(value)) is not None and is_a(value, list, tuple):
        return tuple(map(value_of, found[1]))
    return bare if (bare := builtin_of(value)) is not None else value if is_plain(value) else id(value)


def is_option(value: object, depth: int = 4) -> bool:
    """Whether it is a plain value, a function that holds nothing, or a dictionary of such, by names."""
    if is_a(value, dict):
        return depth > 0 and all(is_a(key, str) and is_option(each, depth - 1) for key, each in dict.items(value))
    if is_a(value, types.FunctionType):
        return not value.__closure__
    return is_plain(value) or is_a(value, types.BuiltinFunctionType)


def is_plain(value: object) -> bool:
    """Whether it is an immutable value without tensors."""
    if is_a(value, tuple):
        return all(map(is_plain, tuple.__iter__(value)))
    return value is None or is_a(value, bool, int, float, complex, str, bytes, Enum, torch.dtype)
