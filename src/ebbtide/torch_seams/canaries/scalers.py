"""What is relied on of gradient scalers."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from ebbtide.torch_seams import scalers
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


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
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    stepped: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: stepped.append(1))
    for is_found in (True, False):
        hidden = nullcontext(([torch.device("cpu")], is_found))
        patch = scalers.unscaling_answered(scaler, optimizer, lambda hidden=hidden: hidden)
        try:
            scaler.step(optimizer)
        finally:
            patch.close()
        scaler.update()
        scaler.scale(torch.ones(()))
    expect(len(stepped) == 1 and scaler.get_scale() == 2.0, "a scaler does not believe what it is told")
    for fused in (True, False):
        made = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], fused=fused)
        expect(scalers.unscales_itself(made) is fused, "fused optimizers are marked otherwise")
