"""What CUDA's libraries take of the allocator at their first call and never give back: it is to be resident in time.

cuBLAS has a workspace per thread and stream, and so has cublasLt, which computes products with a bias
(``CublasHandlePool.cpp``, ``CUDABlas.cpp``). The backward of a step runs on autograd's own thread, whose workspaces
would appear in the first step's backward, which no budget could have counted.
"""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.torch_seams.fake_tensors import without_modes

__all__ = ["take_workspaces"]

_SIZE = 16
"""Of the matrices: products of smaller ones may go another way."""


class _BothWays(torch.autograd.Function):
    """Products where the forward runs, and where the backward does."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor) -> torch.Tensor:
        ctx.one = one.detach()
        return _products(one)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        # A kernel first: cuBLAS warns on a thread of which CUDA knows nothing yet, and autograd's may be such a one.
        return _products(ctx.one.clone())


def _products(one: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(one @ one, one, one[0])


def take_workspaces() -> None:
    """Let cuBLAS take what it needs for the current stream of the current CUDA device, on this thread and autograd's.

    A backward begins and ends; the caller sees to it that nobody takes it for one that trains.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    with without_modes(), torch.enable_grad(), torch.autocast("cuda", enabled=False):
        one = torch.ones(_SIZE, _SIZE, dtype=torch.float32, device=device, requires_grad=True)
        torch.autograd.grad(_BothWays.apply(one).sum(), one)  # type: ignore[union-attr]
