"""What an optimizer's step takes while it runs, above parameters, gradients and state; found out without that memory.

A stand-in of the optimizer steps twice on fake tensors, the first time to make its state. What the second step holds at
its peak is counted as storages come and go.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ebbflow.measurement.optimizer_state import options_of
from ebbflow.measurement.resident import stepping
from ebbflow.signals import raised_by_a_handler, signals_wait
from ebbflow.torch_seams.fake_tensors import (
    fakes_are_counted,
    fakes_are_stepped_as_parameters,
    numbers_are,
    quiet_log,
    sizes_only,
    without_modes,
)

__all__ = ["step_bytes"]


def step_bytes(optimizer: torch.optim.Optimizer, device: str | None = None) -> int | None:
    """Bytes that a step of ``optimizer`` takes at its peak; ``None`` if that cannot be found out.

    Steps on fake tensors cannot be taken by optimizers with kernels of their own, nor those that want a closure.

    Args:
        optimizer: of real, fake or meta parameters.
        device: type of the one to step on, where some optimizers take other ways; that of the parameters if ``None``.
    """
    optimizer = stepping(optimizer)
    with signals_wait(), without_modes(), quiet_log():
        for answer in (1, 0):
            try:
                with sizes_only(), numbers_are(answer), fakes_are_stepped_as_parameters():
                    return _taken(optimizer, device)
            except Exception as error:  # any optimizer of the user's may raise anything here
                if raised_by_a_handler(error):
                    raise
    return None


def _taken(optimizer: torch.optim.Optimizer, device: str | None) -> int:
    groups = [
        {**options_of(group), "params": list(_stand_ins(group["params"], device))} for group in optimizer.param_groups
    ]
    trial = type(optimizer)(groups)  # type: ignore[call-arg]
    trial.step()
    with fakes_are_counted() as counted:
        trial.step()
    return counted.peak_bytes


def _stand_ins(parameters: list[torch.nn.Parameter], device: str | None) -> Iterator[torch.nn.Parameter]:
    for each in parameters:
        stand_in = torch.nn.Parameter(torch.zeros(each.shape, dtype=each.dtype, device=device or each.device))
        if each.requires_grad:
            stand_in.grad = torch.zeros_like(stand_in)
        yield stand_in
