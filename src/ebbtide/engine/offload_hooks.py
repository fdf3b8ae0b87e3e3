"""Hooks that move a model's weights in and out of it (accelerate's and diffusers' offloading), refused by name.

The bytes that they move are in no plan. They may be put on a model before it is fitted, which ``fit`` refuses, or
after: that is seen when a step is captured, and where the weights are on no device that steps run on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch

from ebbtide.errors import UsageError

__all__ = ["refuse_offload_hooks", "refuse_place"]

_MOVING_HOOKS = ("AlignDevicesHook", "CpuOffload", "UserCpuOffloadHook")


def refuse_offload_hooks(model: torch.nn.Module) -> None:
    """Refuse a model of which a module has such a hook.

    Raises:
        UsageError: naming module and hook, and what to do.
    """
    for path, module in cast("Iterator[tuple[str, torch.nn.Module]]", model.named_modules()):
        for hook in _hooks(getattr(module, "_hf_hook", None)):
            name = type(hook).__name__
            if name in _MOVING_HOOKS or getattr(hook, "offload", False):
                raise UsageError(
                    f"{f'its module {path}' if path else 'the model'} has a {name}, which moves its weights in and out "
                    'behind the plan; load the model on one device without it (no device_map="auto", no CPU or disk '
                    "offload), or take the hooks off (accelerate.hooks.remove_hook_from_submodules)",
                    argument="model",
                )


def refuse_place(model: torch.nn.Module, device: str) -> None:
    """Refuse a fitted model that is on a device that no step runs on, such as ``meta``, by now.

    Raises:
        UsageError: naming what moved it, if that is known.
    """
    refuse_offload_hooks(model)
    raise UsageError(
        f"the model was on a CPU or a CUDA device when it was fitted and is on {device} now, where no step is planned; "
        "move it back before the call, or ebbtide.unfit(model) first",
        argument="model",
        value=device,
    )


def _hooks(hook: object) -> Iterator[object]:
    """``hook`` and those that it runs one after the other (accelerate's SequentialHook)."""
    if hook is None:
        return
    yield hook
    inner = getattr(hook, "hooks", ())
    for each in cast("Sequence[object]", inner) if isinstance(inner, tuple | list) else ():
        yield from _hooks(each)
