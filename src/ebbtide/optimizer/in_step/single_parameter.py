"""A step of an optimizer for one parameter: its own, of a group that has this parameter alone.

The optimizer's class steps, below its hooks and whatever counts its calls (``torch_seams.optimizers``). Its options are
read from its groups as they are then, so that ``foreach``, ``fused``, ``maximize`` and the rest give their own bits.
State is made and kept where it always is.
"""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.torch_seams.compiling_flag import while_nothing_is_captured
from ebbtide.torch_seams.optimizers import gradient_of, own_step, set_gradient

__all__ = ["step_parameter"]


def step_parameter(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor
) -> None:
    """Update ``parameter`` of ``group`` by ``gradient``, added to the one that it has, if any, which is gone then.

    One that *is* the gradient that it has is not added again.
    """
    groups = optimizer.param_groups
    with while_nothing_is_captured(), torch.no_grad():
        existing = gradient_of(parameter)
        if existing is not None and existing is not gradient:
            existing += gradient  # as autograd adds where no graph is made
        elif existing is None:
            set_gradient(parameter, gradient)
        optimizer.param_groups = [{**group, "params": [parameter]}]
        try:
            own_step(type(optimizer))(optimizer)
        finally:
            optimizer.param_groups = groups
            set_gradient(parameter, None)
