"""Blocks for what shares memory: views of views, changes in place, buffers changed by the forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from random_models.block import Block, Body, Draw, Shape, block, mix, one_of


def _views_of_views(m: Any, x: Tensor) -> Tensor:
    y = m.parts[0](x)
    flat = y.reshape(y.shape[0], -1)
    a, b = flat.view(y.shape[0], 2, -1).transpose(0, 1).unbind(0)
    c = a.unsqueeze(1).expand(-1, 2, -1)
    d = torch.stack((b, a * b.tanh()), 1)
    return (c * d.sigmoid() + c.flip(1).exp().log1p()).reshape(x.shape) + y


def _pieces(m: Any, x: Tensor) -> Tensor:
    y = m.parts[0](x)
    a, b, c, d = y.chunk(4, -1)
    quarter = y.shape[-1] // 4
    e, f = torch.split(y, [quarter, 3 * quarter], -1)
    return torch.cat((a.tanh() * b, c - d, e + b, f.narrow(-1, quarter, quarter).exp() * a), -1)


def _permuted(m: Any, x: Tensor) -> Tensor:
    y = m.parts[0](x).movedim(0, -1)
    z = y.contiguous().tanh()
    return (z * y.flip(0)).movedim(-1, 0) + x.roll((1, 2), (0, -1))


@block(weight=4)
def _views(draw: Draw, shape: Shape) -> Block:
    variants: dict[str, Body] = {
        "of views": _views_of_views,
        "pieces": _pieces,
        "permuted": _permuted,
        "unfold": lambda m, x: m.parts[0](x) + F.pad(m.parts[0](x), (2, 2)).unfold(-1, 5, 1).square().mean(-1),
        "expanded": lambda m, x: x.unsqueeze(0).expand(3, *x.shape).mul(m.scale).tanh().sum(0),
        "steps": lambda m, x: torch.stack((m.parts[0](x)[..., ::2], x[..., 1::2].exp()), -1).flatten(-2),
        "rotary": lambda m, x: torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * m.cos + x,
        "diagonal": lambda m, x: x + m.parts[0](x).diagonal(0, 0, -1).mean() + x.diagonal(1, -2, -1).sum(),
        "repeat": lambda m, x: x.repeat(2, *[1] * (x.dim() - 1)).view(2, *x.shape).exp().mean(0) + x.tile((1,)),
        "squeezed": lambda m, x: (m.parts[0](x)[:, :1].squeeze(1).tanh().unsqueeze(1) + x).contiguous(),
        "as_strided": lambda m, x: x + m.parts[0](x).contiguous().as_strided((shape[-1],), (2,), 1).exp(),
        "bits": lambda m, x: x + (m.parts[0](x).view(torch.int32) > 0).to(x.dtype) * x,
        "window": lambda m, x: m.parts[0](x).unflatten(-1, (2, -1)).transpose(-1, -2).softmax(-1).flatten(-2) + x,
        "diag_embed": lambda m, x: (torch.diag_embed(m.cos) @ m.parts[0](x)[..., None]).squeeze(-1),
        "hsplit": lambda m, x: torch.hstack(m.parts[0](x).hsplit(2)[::-1]) * x,
        "meshgrid": lambda m, x: x + torch.meshgrid(m.cos, m.cos[:3], indexing="ij")[0].sum(1),
    }
    return one_of(
        draw,
        "views",
        variants,
        mix(shape),
        scale=nn.Parameter(torch.rand(3, *[1] * len(shape))),
        cos=torch.arange(shape[-1]).cos(),
    )


def _slices_assigned(m: Any, x: Tensor) -> Tensor:
    y = m.parts[0](x).clone()
    y[..., ::2].mul_(2)
    y[:, 0] = 0
    y += 1
    z = torch.zeros_like(y)
    z[..., 1:] = y[..., :-1].tanh()
    z[0, 0] += x[0, 0]
    return z + y


def _through_views(m: Any, x: Tensor) -> Tensor:
    y = m.parts[0](x) * 1.5
    flipped, first = y.transpose(0, -1), y.view(2, -1)[0]
    y.unsqueeze(0).select(0, 0).narrow(-1, 0, 3).mul_(m.scale)
    flipped[1].add_(0.5)
    y.add_(x)
    return y.relu_() + first.mean() + flipped.mean(-1).transpose(0, -1)[:1].mean()


def _filled(m: Any, x: Tensor) -> Tensor:
    y = m.parts[0](x)
    y.masked_fill_(x > 1, 0.5).index_fill_(-1, m.index[:2], 1.0)
    y.clamp_(-2, 2)
    z = torch.full_like(x, 0.1)
    z.index_add_(x.dim() - 1, m.index, x).scatter_add_(-1, m.index.expand(x.shape), y)
    z.index_copy_(0, m.index[:1] * 0, x[:1].exp())
    z[..., m.index[:3]] = y[..., :3]
    return z.sigmoid_()


def _chained(m: Any, x: Tensor) -> Tensor:
    y = m.parts[0](x).add_(1).mul_(m.scale)
    y = y.sub_(x.mean()).div_(2).tanh_()
    z = torch.empty_like(y).copy_(x).zero_().add_(y.exp()).sub_(x.square(), alpha=0.1)
    return torch.add(z, y) + torch.ones(x.shape[-1]).cumsum_(0).div_(x.shape[-1]) * torch.tensor([0.5])


@block(weight=4)
def _in_place(draw: Draw, shape: Shape) -> Block:
    variants: dict[str, Body] = {
        "slices": _slices_assigned,
        "views": _through_views,
        "filled": _filled,
        "chained": _chained,
        "addcmul": lambda m, x: torch.ones_like(x).addcmul_(m.parts[0](x), x.tanh(), value=0.1),
        "index_put": lambda m, x: torch.zeros_like(x).index_put_((torch.arange(x.shape[0]) // 2,), x, accumulate=True),
    }
    index = torch.randperm(shape[-1])
    return one_of(draw, "in_place", variants, mix(shape), index=index, scale=nn.Parameter(torch.ones(())))


def _rest(x: Tensor) -> list[int]:
    """Every dimension but the last."""
    return list(range(x.dim() - 1))


def _counter(m: Any, x: Tensor) -> Tensor:
    m.count.add_(1)
    return m.parts[0](x) * (1 + 0.1 * m.count.clone())


def _moving_average(m: Any, x: Tensor) -> Tensor:
    y = m.parts[0](x)
    with torch.no_grad():
        m.mean.mul_(0.9).add_(y.mean(_rest(y)), alpha=0.1)
    return (y - m.mean.clone()).tanh()


def _moving_extreme(m: Any, x: Tensor) -> Tensor:
    m.mean.copy_(torch.maximum(m.mean, x.detach().abs().amax(_rest(x))))
    return x / (1 + m.mean.clone())


def _queue(m: Any, x: Tensor) -> Tensor:
    old = m.queue.clone()
    m.queue[:1] = x.detach().mean(_rest(x))
    m.queue[1:] = old[:-1]
    return x + (x @ old.T).softmax(-1) @ old


def _power_iteration(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        v = F.normalize(m.weight.T @ m.mean, dim=0)
        m.mean.copy_(F.normalize(m.weight @ v, dim=0))
    sigma = torch.dot(m.mean.clone(), m.weight @ v)
    return F.linear(x, m.weight / sigma)


def _codebook(m: Any, x: Tensor) -> Tensor:
    nearest = torch.cdist(x.detach().flatten(0, -2), m.queue).argmin(-1)
    chosen = m.queue[nearest].view(x.shape)
    used = F.one_hot(nearest, 8).float()
    m.queue.mul_(0.99).add_(used.T @ x.detach().flatten(0, -2), alpha=0.01 / used.shape[0])
    return x + (chosen - x).detach() + 0.1 * x.tanh()


@block(weight=3)
def _state(draw: Draw, shape: Shape) -> Block:
    variants: dict[str, Body] = {
        "counter": _counter,
        "moving average": _moving_average,
        "moving extreme": _moving_extreme,
        "queue": _queue,
        "power iteration": _power_iteration,
        "codebook": _codebook,
        "spectral norm": lambda m, x: m.parts[1](x),
        "weight norm": lambda m, x: m.parts[2](x),
    }
    width = shape[-1]
    parts = (
        mix(shape),
        parametrizations.spectral_norm(nn.Linear(width, width)),
        parametrizations.weight_norm(nn.Linear(width, width)),
    )
    return one_of(
        draw,
        "state",
        variants,
        *parts,
        count=torch.zeros((), dtype=draw.choice([torch.int64, torch.float32])),
        mean=torch.rand(width),
        queue=torch.randn(8, width),
        weight=nn.Parameter(torch.randn(width, width) / width**0.5),
    )
