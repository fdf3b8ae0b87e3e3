"""What is relied on of gradient scalers."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ebbtide.torch_seams import optimizers, scalers
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


class _Hidden(torch.nn.Parameter):
    found = False

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        frame = sys._getframe(1)
        if scalers.is_unscaling(frame):
            scalers.tell_found(frame, self.device, found=_Hidden.found)
            return None
        return optimizers.gradient_of(self)


@canary
def scalers_are_told_what_was_found() -> None:
    """A scaler takes another's word for a gradient that it is not shown, and steps or does not."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    expect(scalers.inverse_scale_of(scaler) is None, "a scaler has a scale before it scales")
    scaler.scale(torch.ones(()))
    factor = scalers.inverse_scale_of(scaler)
    expect(factor is not None and float(factor) == 0.25, "a scale is kept otherwise")
    assert factor is not None
    gradient, found = torch.tensor([8.0, float("inf")]), torch.zeros(())
    scalers.multiply_and_check(gradient, found, torch.ones(()))
    expect(float(found) == 1.0 and gradient.tolist() == [8.0, float("inf")], "what is not finite is not found")
    scalers.multiply_and_check(gradient[:1], found.zero_(), factor)
    expect(float(found) == 0.0 and float(gradient[0]) == 2.0, "a gradient is unscaled otherwise")
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.__class__ = _Hidden  # type: ignore[assignment]
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    stepped: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: stepped.append(1))
    for _Hidden.found in (True, False):
        scaler.step(optimizer)
        scaler.update()
        scaler.scale(torch.ones(()))
    expect(len(stepped) == 1 and scaler.get_scale() == 2.0, "a scaler does not believe what it is told")
    for fused in (True, False):
        made = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], fused=fused)
        expect(scalers.unscales_itself(made) is fused, "fused optimizers are marked otherwise")
