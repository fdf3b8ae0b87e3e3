"""Dropout on CPU as eager computes it: a mask, the noise made of it, a product.

Under ``torch.compile`` PyTorch traces dropout as ``native_dropout``, the fused call of CUDA. On CPU eager never calls
it, and it differs there: its noise is not rounded to bfloat16, it draws numbers for a probability of 1, it copies its
input for a probability of 0, and it casts its mask anew for every product. Here the mask has one byte per element as
in ``native_dropout``; the noise is an op of its own, so that a plan may keep either, or make the noise again without
drawing (docs/adr/0003).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ebbtide.torch_seams.dispatcher import traced_as

__all__ = ["dropout_as_eager"]

_aten = torch.ops.aten


@contextmanager
def dropout_as_eager() -> Iterator[None]:
    """While open, a traced dropout of a CPU tensor is that of ``aten/src/ATen/native/Dropout.cpp``."""
    with traced_as(_aten.dropout.default, _dropout), traced_as(_aten.dropout_.default, _dropout_in_place):
        yield


def _dropout(described: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if not _is_ours(input):
            return described(input, p, train)
        return input * _noise(input, p) if train and p != 0 and input.numel() else input

    return dropout


def _dropout_in_place(_: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def dropout_(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        # In place eager has no fused call on any device.
        return input.mul_(_noise(input, p)) if train and p != 0 and input.numel() else input

    return dropout_


def _is_ours(input: torch.Tensor) -> bool:
    return input.device.type == "cpu" and input.is_floating_point()


def _noise(input: torch.Tensor, p: float) -> torch.Tensor:
    """What dropout multiplies ``input`` with; ``p`` in (0, 1]."""
    if p == 1:
        return torch.zeros((), dtype=input.dtype, device=input.device)
    if not _is_ours(input):
        return torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)
    mask = _draw_bytes(input, 1 - p)
    if input.dtype != torch.get_default_dtype():  # else what an integer divided by a number has
        mask = mask.to(input.dtype)
    return mask / (1 - p)


def _draw_bytes(input: torch.Tensor, keep: float) -> torch.Tensor:
    """Ones with probability ``keep``, else zeros, laid out and drawn as ``empty_like(input).bernoulli_(keep)``.

    ``bernoulli_`` draws in the order of memory, ``bernoulli`` for a contiguous result. The draws are the same for
    every dtype; torch casts bytes to float four times as fast as ``bool``.
    """
    unwritten = torch.empty_like(input, dtype=torch.uint8)
    order = sorted(range(input.dim()), key=lambda d: (-unwritten.stride(d), d))
    drawn = torch.ops.aten.bernoulli.p(unwritten.permute(order), keep)
    return drawn.permute([order.index(d) for d in range(input.dim())])
