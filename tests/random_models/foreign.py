"""Blocks with other people's code and other types: autograd functions, custom ops, complex and short numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from random_models.block import Block, Body, Draw, Shape, block, mix, one_of


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, x.square())
        ctx.scale = scale
        return scale * x * x * x, x > 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        _, square = ctx.saved_tensors
        return 3 * ctx.scale * square * gradient, None


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.clone()


@torch.library.custom_op("ebbtide_random::swish", mutates_args=())
def _swish(x: Tensor, scale: float) -> list[Tensor]:
    gate = torch.sigmoid(scale * x)
    return [x * gate, gate]


@torch.library.custom_op("ebbtide_random::decay", mutates_args=("x",))
def _decay(x: Tensor, rate: float) -> None:
    x.mul_(rate)


def _keep_swish(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.scale = inputs[1]


def _swish_backward(ctx: Any, gradients: Any) -> Any:
    x, gate = ctx.saved_tensors
    slope = ctx.scale * gate * (1 - gate)
    return gradients[0] * (gate + x * slope) + gradients[1] * slope, None


_swish.register_fake(lambda x, scale: [torch.empty_like(x), torch.empty_like(x)])
_swish.register_autograd(_swish_backward, setup_context=_keep_swish)


def _decayed(m: Any, x: Tensor) -> Tensor:
    _decay(m.rate, 0.99)
    return m.parts[0](x) * m.rate.clone()


@block(weight=2)
def _custom(draw: Draw, shape: Shape) -> Block:
    variants: dict[str, Body] = {
        "function": lambda m, x: _Cube.apply(m.parts[0](x).tanh(), 0.5)[0] + x,
        "function of two": lambda m, x: torch.where(*_Cube.apply(m.parts[0](x).tanh(), 0.5)[::-1], x),
        "straight through": lambda m, x: _StraightThrough.apply(m.parts[0](x)).sin(),
        "op": lambda m, x: m.parts[0](_swish(x, 1.5)[0]),
        "op of two": lambda m, x: torch.mul(*_swish(m.parts[0](x), 0.7)),
        "op on a buffer": _decayed,
    }
    return one_of(draw, "custom", variants, mix(shape), rate=torch.ones(shape[-1]))


@block(weight=2)
def _dtypes(draw: Draw, shape: Shape) -> Block:
    size = shape[-1]

    def filtered(m: Any, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * m.filter
        return torch.fft.irfft(spectrum, n=size) + torch.view_as_real(spectrum).square().mean((-1, -2)).unsqueeze(-1)

    def rotated(m: Any, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        turned = pairs * torch.polar(torch.ones(size // 2), m.angle)
        return torch.view_as_real(turned).flatten(-2) + turned.conj().imag.repeat_interleave(2, -1)

    variants: dict[str, Body] = {
        "rfft": filtered,
        "fft": lambda m, x: torch.fft.fft2(x).real.tanh() + x,
        "rotary complex": rotated,
        "double": lambda m, x: m.parts[0](x.double()).tanh().exp().float(),
        "bfloat16": lambda m, x: (x.bfloat16() * m.angle[:1].bfloat16()).tanh().float() + x,
        "half": lambda m, x: x.half().float() + x.to(torch.float16).exp().float(),
        "integers": lambda m, x: x + (x.detach() * 8).to(torch.int32).remainder(3) / 3,
    }
    spectrum = nn.Parameter(torch.randn(size // 2 + 1, dtype=torch.complex64))
    return one_of(
        draw, "dtypes", variants, mix(shape).double(), filter=spectrum, angle=nn.Parameter(torch.rand(size // 2))
    )
