"""Kernels that torch decomposes, or could: eager's bits at eager's bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from situations.parts import Wrapped
from situations.registry import situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


class Resized(nn.Module):
    """Convolutions around a resize to twice the size, or ``size``."""

    def __init__(self, dims: int, resize: Any) -> None:
        super().__init__()
        kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        self.convs = nn.ModuleList([kind(4, 8, 3, padding=1), kind(8, 8, 3, padding=1), kind(8, 8, 3, padding=1)])
        self.last, self.resize = kind(8, 4, 3, padding=1), resize

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            x = F.relu(conv(x))
        return self.last(self.resize(x)).square().mean()


def _interpolated(dims: int, **how: Any) -> Any:
    shape = (4, 4, *{1: (256,), 2: (24, 24), 3: (8, 12, 12)}[dims])
    return lambda: Resized(dims, lambda x: F.interpolate(x, **({"scale_factor": 2} | how))), shape


INTERPOLATIONS = {
    "nearest": _interpolated(2, mode="nearest"),
    "nearest_1d": _interpolated(1, mode="nearest"),
    "nearest_exact": _interpolated(2, mode="nearest-exact"),
    "linear": _interpolated(1, mode="linear"),
    "linear_corners": _interpolated(1, mode="linear", align_corners=True),
    "bilinear": _interpolated(2, mode="bilinear"),
    "bilinear_corners": _interpolated(2, mode="bilinear", align_corners=True),
    "bilinear_size": _interpolated(2, mode="bilinear", size=(37, 41), scale_factor=None),
    "bilinear_down": _interpolated(2, mode="bilinear", scale_factor=0.5),
    "bilinear_antialiased": _interpolated(2, mode="bilinear", scale_factor=0.5, antialias=True),
    "bicubic": _interpolated(2, mode="bicubic"),
    "bicubic_corners": _interpolated(2, mode="bicubic", align_corners=True),
    "trilinear": _interpolated(3, mode="trilinear"),
    "trilinear_corners": _interpolated(3, mode="trilinear", align_corners=True),
    "area": _interpolated(2, mode="area", scale_factor=0.5),
}


@variants(INTERPOLATIONS, share=1.0)
def interpolate(run: Run, case: Any) -> None:
    """Eager's kernels and eager's bytes."""
    make, shape = case
    run.train(make(), lambda m, i: _loss(m, run.x(i, *shape)), steps=3)


@situation(share=1.0)
def upsample_module(run: Run) -> None:
    inner = nn.Upsample(scale_factor=2, mode="bicubic")
    run.train(Resized(2, inner), lambda m, i: _loss(m, run.x(i, 4, 4, 24, 24)), steps=3)


DECOMPOSED = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "logsigmoid": F.logsigmoid,
    "softmax": lambda x: x.softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 4),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "instance_norm": lambda x: F.instance_norm(x.unflatten(1, (8, 8))).flatten(1),
    "glu": lambda x: F.glu(x, -1),
    "cumprod": lambda x: (x / 4 + 1).cumprod(-1),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "var_mean": lambda x: sum(torch.var_mean(x, -1, keepdim=True)) + x,
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction="none"),
    "kl": lambda x: F.kl_div(x.log_softmax(-1), torch.full_like(x, 1 / 64), reduction="none"),
    "grid_sample": lambda x: F.grid_sample(
        x.view(4, 4, 64, 64), torch.tanh(x.view(4, 4, 64, 64)[:, :2]).permute(0, 2, 3, 1), align_corners=False
    ).reshape(x.shape),
    "unfold": lambda x: F.unfold(x.view(4, 4, 64, 64), 3, padding=1).mean(1),
    "reflection_pad": lambda x: F.pad(x.view(4, 4, 64, 64), (1, 1, 1, 1), mode="reflect"),
    "adaptive_pool": lambda x: F.adaptive_avg_pool2d(x.view(4, 4, 64, 64), (7, 5)),
    "index_add": lambda x: torch.zeros_like(x).index_add(0, torch.arange(1024) % 100, x),
    "scatter_reduce": lambda x: torch.zeros_like(x).scatter_reduce(0, (x > 0).long(), x, "amax"),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "sort": lambda x: x.sort(-1).values * torch.arange(64),
    "embedding_bag": lambda x: F.embedding_bag(torch.arange(1024).view(128, 8), x, mode="mean"),
    "dropout2d": lambda x: F.dropout2d(x.view(4, 4, 64, 64), 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x, 0.7),
}


@variants(DECOMPOSED, share=1.02)
def operation(run: Run, function: Any) -> None:
    """A kernel between layers: eager's bits at eager's bytes."""
    run.train(Wrapped(lambda m, x: function(x).square().mean(), depth=3), lambda m, i: _loss(m, run.x(i)), steps=3)
