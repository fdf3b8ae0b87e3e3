"""Hooks on every module of the process (``register_module_forward_hook`` and its kin)."""

from __future__ import annotations

from torch.nn.modules import module as _module

__all__ = ["global_hooks"]

_TABLES = (
    _module._global_forward_pre_hooks,
    _module._global_forward_hooks,
    _module._global_backward_pre_hooks,
    _module._global_backward_hooks,
)


def global_hooks() -> tuple[tuple[int, ...], ...]:
    """The numbers of those that are registered, by kind; no number is given twice in a process.

    A step depends on them, and Dynamo has no guard for them.
    """
    return tuple(map(tuple, _TABLES)) if any(_TABLES) else ()
