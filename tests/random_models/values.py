"""Blocks that compute with values: noise, masks, order, statistics."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from random_models.block import Block, Body, Draw, Shape, block, mix, one_of


@block(weight=2)
def _noise(draw: Draw, shape: Shape) -> Block:
    variants: dict[str, Body] = {
        "randn_like": lambda m, x: x + 0.1 * torch.randn_like(x),
        "rand_like": lambda m, x: x * (0.5 + torch.rand_like(x)),
        "rand": lambda m, x: x + torch.rand(x.shape[-1]),
        "bernoulli": lambda m, x: x * torch.bernoulli(torch.full_like(x, 0.8)),
        "bernoulli of x": lambda m, x: x + torch.bernoulli(x.detach().sigmoid()),
        "normal": lambda m, x: x + torch.normal(0.0, 0.1, x.shape),
        "normal_": lambda m, x: x + 0.1 * torch.empty_like(x).normal_(),
        "randint": lambda m, x: x + 0.1 * torch.randint(0, 3, x.shape[-1:]),
        "randperm": lambda m, x: x[torch.randperm(x.shape[0])],
        "uniform_": lambda m, x: x * torch.empty(x.shape[0], *[1] * (x.dim() - 1)).uniform_(0.5, 1.5),
        "rand mask": lambda m, x: torch.where(torch.rand(x.shape) < 0.1, m.token, x),
        "rrelu": lambda m, x: F.rrelu(x, training=True),
        "gumbel": lambda m, x: x + F.gumbel_softmax(x, dim=-1),
        "multinomial": lambda m, x: x + torch.multinomial(torch.ones(x.shape[-1]), x.shape[-1]) / x.shape[-1],
        "stochastic depth": lambda m, x: x + m.parts[0](x) * (torch.rand(x.shape[0], *[1] * (x.dim() - 1)) < 0.7) / 0.7,
    }
    return one_of(draw, "noise", variants, mix(shape), token=nn.Parameter(torch.zeros(())))


@block(weight=2)
def _masking(draw: Draw, shape: Shape) -> Block:
    variants: dict[str, Body] = {
        "where": lambda m, x: torch.where(x > 0, x, 0.2 * m.parts[0](x)),
        "masked_fill": lambda m, x: m.parts[0](x).masked_fill(x < -0.5, 0.1),
        "buffer": lambda m, x: m.parts[0](x) * m.mask,
        "clamp": lambda m, x: m.parts[0](x).clamp(-0.5, 0.5) + x.clamp_min(0),
        "tril": lambda m, x: x + m.parts[0](x).tril() - x.triu(2),
        "maximum": lambda m, x: torch.maximum(m.parts[0](x), x) + torch.minimum(x, m.mask),
        "lerp": lambda m, x: torch.lerp(x, m.parts[0](x), x.sigmoid()),
        "addcmul": lambda m, x: torch.addcmul(x, m.parts[0](x), x.tanh(), value=0.5),
        "abs sign": lambda m, x: m.parts[0](x).abs().add(0.1).sqrt() * x.sign(),
    }
    return one_of(draw, "masking", variants, mix(shape), mask=(torch.rand(shape[-1]) < 0.8).float())


@block(weight=2)
def _order(draw: Draw, shape: Shape) -> Block:
    size = shape[-1]
    variants: dict[str, Body] = {
        "cumsum": lambda m, x: x.cumsum(-1) / size,
        "cumulative product": lambda m, x: x.tanh().cumprod(-1) + x,
        "logcumsumexp": lambda m, x: x.logcumsumexp(-1),
        "sort": lambda m, x: x + x.sort(-1).values,
        "argsort": lambda m, x: x.gather(-1, x.argsort(-1, descending=True)),
        "topk": lambda m, x: x * x.topk(3, -1).values.mean(-1, keepdim=True),
        "topk mask": lambda m, x: torch.zeros_like(x).scatter(-1, x.topk(4, -1).indices, 1.0) * x,
        "gather": lambda m, x: x + x.gather(-1, m.index.expand(x.shape)),
        "take_along_dim": lambda m, x: torch.take_along_dim(x, m.index.expand(x.shape), -1),
        "scatter_add": lambda m, x: torch.zeros_like(x).scatter_add(-1, m.index.expand(x.shape), x),
        "scatter_reduce": lambda m, x: x.scatter_reduce(-1, m.index.expand(x.shape), x, "amax"),
        "index_select": lambda m, x: x.index_select(-1, m.index) + x[..., m.index],
        "index_add": lambda m, x: x.index_add(x.dim() - 1, m.index, 0.5 * x),
        "maximum": lambda m, x: x - x.max(-1, keepdim=True).values + x.amin(0, keepdim=True),
        "median": lambda m, x: x - x.median(-1, keepdim=True).values,
        "kthvalue": lambda m, x: x - x.kthvalue(2, -1, keepdim=True).values,
        "cummax": lambda m, x: x.cummax(-1).values - x.cummin(0).values,
        "one_hot": lambda m, x: x + F.one_hot(x.argmax(-1), size) * x,
        "searched": lambda m, x: x + m.table[torch.bucketize(x.detach(), m.edges)],
    }
    index, table = torch.randint(size, (size,)), nn.Parameter(torch.randn(6))
    return one_of(draw, "order", variants, index=index, table=table, edges=torch.linspace(-1, 1, 5))


@block(weight=2)
def _statistics(draw: Draw, shape: Shape) -> Block:
    variants: dict[str, Body] = {
        "standardised": lambda m, x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 0.1),
        "var_mean": lambda m, x: x - torch.var_mean(x, 0, keepdim=True)[1],
        "normalize": lambda m, x: F.normalize(x, dim=-1) * 4,
        "logsumexp": lambda m, x: x - x.logsumexp(-1, keepdim=True),
        "norm": lambda m, x: x / (1 + x.norm(dim=-1, keepdim=True)),
        "softmax over batch": lambda m, x: x * x.softmax(0) * x.shape[0],
        "prod": lambda m, x: x + x[..., :3].prod(-1, keepdim=True),
        "covariance": lambda m, x: x + (x.flatten(0, -2).T @ x.flatten(0, -2) / x.numel())[0],
        "distances": lambda m, x: x + torch.cdist(x, x).mean(-1, keepdim=True) if x.dim() < 4 else x.square(),
        "outer": lambda m, x: x + torch.outer(m.scale, m.scale).sum(0),
        "power": lambda m, x: x.square().add(0.5).pow(0.7) + x.add(4).abs().log() + x.sin() * x.cos() + x.erf(),
    }
    return one_of(draw, "statistics", variants, scale=nn.Parameter(torch.rand(shape[-1])))
