"""What is relied on of clipping by a global norm: one gradient at a time it gives what it gives of all together."""

from __future__ import annotations

import torch

from ebbtide.torch_seams import gradient_norms
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def norms_are_taken_one_by_one() -> None:
    """Norms, their order and what they scale are those of ``clip_grad_norm_``, whatever the types of gradients are."""
    drawing = torch.Generator().manual_seed(1)
    kinds = (
        (3, torch.float32),
        (90, torch.bfloat16),
        (4, torch.complex64),
        (5, torch.float32),
        (2, torch.float64),
    )
    drawn = [torch.randn(7, size, generator=drawing).to(dtype) for size, dtype in kinds]
    parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in drawn]
    for parameter, gradient in zip(parameters, drawn, strict=True):
        parameter.grad = gradient.clone()
    total = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    mine = gradient_norms.total_of([gradient_norms.norm_of(each) for each in drawn], drawn)
    expect(torch.equal(total, mine), "a norm is taken otherwise")
    for parameter, gradient in zip(parameters, drawn, strict=True):
        scaled = gradient.clone()
        gradient_norms.scale_by(scaled, gradient_norms.coefficient_of(mine, 0.5))
        theirs = parameter.grad
        expect(theirs is not None and torch.equal(scaled, theirs), "gradients are scaled otherwise")
