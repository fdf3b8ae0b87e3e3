"""How many bytes an optimizer's state will take, before its first step has made it."""

from __future__ import annotations

import torch

from ebbflow.errors import UsageError
from ebbflow.measurement.resident import resident_bytes
from ebbflow.torch_seams.fake_tensors import without_modes

__all__ = ["future_state_bytes"]


def future_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that ``optimizer`` will hold after its next step and does not hold yet.

    One parameter of each distinct shape, dtype and device is stepped alone by an optimizer of the same class and
    options, and its state is counted; so this takes no more than one parameter's worth of memory.

    Raises:
        UsageError: if an optimizer of this class cannot be made from its parameter groups, or steps otherwise than
            by ``step()``.
    """
    sizes: dict[tuple[object, ...], int] = {}
    total = 0
    for position, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            if optimizer.state.get(parameter) or not parameter.requires_grad:
                continue
            key = (position, tuple(parameter.shape), parameter.dtype, parameter.device)
            if key not in sizes:
                sizes[key] = _state_bytes(type(optimizer), options, parameter)
            total += sizes[key]
    return total


def _state_bytes(kind: type[torch.optim.Optimizer], options: dict[str, object], like: torch.nn.Parameter) -> int:
    with without_modes():  # a capture traces under a fake-tensor mode, in which no state takes bytes
        stand_in = torch.nn.Parameter(torch.zeros_like(like, requires_grad=False))
        stand_in.grad = torch.zeros_like(stand_in)
        try:
            trial = kind([{**options, "params": [stand_in]}])  # type: ignore[call-arg]
            trial.step()
        except Exception as error:  # any optimizer of the user's may raise anything here
            raise UsageError(
                f"the state of {kind.__name__} cannot be foreseen ({error}); "
                "run one optimizer step before fit, or leave optimizer= out",
                argument="optimizer",
                value=kind,
            ) from error
        return resident_bytes([dict(trial.state[stand_in])])
