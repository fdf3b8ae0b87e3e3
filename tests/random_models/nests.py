"""Nests, shared and frozen parts, and blocks that lead from one kind to another."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from random_models.block import IMAGE, ROWS, TOKENS, Block, Body, Draw, Shape, block, channels, mix, with_channels


def _nested(draw: Draw, name: str, body: Body, *parts: nn.Module, **tensors: Tensor) -> Block:
    inner = ", ".join(part.recipe for part in parts if isinstance(part, Block))
    return Block(f"{name}({inner})", body, *parts, **tensors)


@block(weight=4, nests=True)
def _residual(draw: Draw, shape: Shape) -> Block:
    inner = [draw.keeping(shape) for _ in range(draw.choice([1, 2, 3]))]

    def body(m: Any, x: Tensor) -> Tensor:
        y = x
        for part in m.parts:
            y = part(y)
        return x + y

    return _nested(draw, "residual", body, *inner)


@block(weight=2, nests=True)
def _parallel(draw: Draw, shape: Shape) -> Block:
    across = 1 if len(shape) == IMAGE else -1
    wide = with_channels(shape, 2 * channels(shape))

    def body(m: Any, x: Tensor) -> Tensor:
        return m.parts[2](torch.cat([m.parts[0](x), m.parts[1](x)], across))

    return _nested(draw, "parallel", body, draw.keeping(shape), draw.keeping(shape), mix(wide, channels(shape)))


@block(nests=True)
def _gated(draw: Draw, shape: Shape) -> Block:
    def body(m: Any, x: Tensor) -> Tensor:
        return torch.sigmoid(m.parts[0](x)) * m.parts[1](x)

    return _nested(draw, "gated", body, draw.keeping(shape), draw.keeping(shape))


@block(weight=2, nests=True)
def _twice(draw: Draw, shape: Shape) -> Block:
    return _nested(draw, "twice", lambda m, x: x + m.parts[0](m.parts[0](x).tanh()), draw.keeping(shape))


@block(weight=2, nests=True)
def _loop(draw: Draw, shape: Shape) -> Block:
    count = draw.choice([2, 3])

    def body(m: Any, x: Tensor) -> Tensor:
        outputs = [x]
        for index in range(count):
            outputs.append(m.parts[0](outputs[-1]) + index)
        return sum(outputs[1:], start=x) / count

    return _nested(draw, f"loop {count}", body, draw.keeping(shape))


@block(weight=2, nests=True)
def _checkpointed(draw: Draw, shape: Shape) -> Block:
    def body(m: Any, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(m.parts[0], x, use_reentrant=False)

    return _nested(draw, "checkpointed", body, draw.keeping(shape))


@block(nests=True)
def _teacher(draw: Draw, shape: Shape) -> Block:
    def body(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = m.parts[0](x)
        return x * target.sigmoid() + m.parts[0](x).detach()

    return _nested(draw, "teacher", body, draw.keeping(shape))


@block(nests=True)
def _autocast(draw: Draw, shape: Shape) -> Block:
    def body(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.parts[0](x)
        return y.float()

    return _nested(draw, "autocast", body, draw.keeping(shape))


@block(nests=True)
def _frozen(draw: Draw, shape: Shape) -> Block:
    return _nested(draw, "frozen", lambda m, x: m.parts[0](x), draw.keeping(shape)).requires_grad_(False)


@block(weight=2)
def _adapter(draw: Draw, shape: Shape) -> Block:
    width = channels(shape)
    parts = (mix(shape).requires_grad_(False), mix(shape, 4), mix(with_channels(shape, 4), width))

    def body(m: Any, x: Tensor) -> Tensor:
        return m.parts[0](x) + 2 * m.parts[2](F.dropout(m.parts[1](x), 0.1))

    return Block("adapter", body, *parts)


@block(ROWS, TOKENS)
def _tied(draw: Draw, shape: Shape) -> Block:
    first, second = nn.Linear(shape[-1], shape[-1]), nn.Linear(shape[-1], shape[-1], bias=False)
    second.weight = first.weight
    return Block("tied", lambda m, x: F.linear(m.parts[1](m.parts[0](x).tanh()), m.parts[0].weight.T), first, second)


@block(ROWS, TOKENS)
def _experts(draw: Draw, shape: Shape) -> Block:
    def body(m: Any, x: Tensor) -> Tensor:
        weights, chosen = m.parts[0](x).softmax(-1).topk(2, -1)
        outputs = torch.einsum("...c,ecd->...ed", x, m.weight).relu()
        picked = outputs.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, x.shape[-1]))
        return x + (picked * weights.unsqueeze(-1)).sum(-2)

    weight = nn.Parameter(torch.randn(4, shape[-1], shape[-1]) / shape[-1] ** 0.5)
    return Block("experts", body, mix(shape, 4), weight=weight)


@block(ROWS)
def _bilinear(draw: Draw, shape: Shape) -> Block:
    return Block("bilinear", lambda m, x: x + m.parts[0](x.sin(), x.tanh()), nn.Bilinear(shape[1], shape[1], shape[1]))


@block(TOKENS, keeps=False)
def _tokens_to_image(draw: Draw, shape: Shape) -> Block:
    return Block(
        "tokens_to_image",
        lambda m, x: (
            x.transpose(1, 2).unflatten(1, (-1, 4)).transpose(2, 3).reshape(x.shape[0], x.shape[2] // 4, -1, 8)
        ),
    )


@block(TOKENS, keeps=False, weight=0.5)
def _tokens_to_rows(draw: Draw, shape: Shape) -> Block:
    return Block("tokens_to_rows", lambda m, x: x.flatten(0, 1))


@block(IMAGE, keeps=False)
def _image_to_tokens(draw: Draw, shape: Shape) -> Block:
    def body(m: Any, x: Tensor) -> Tensor:
        return m.parts[0](x).flatten(2).transpose(1, 2)

    return Block("image_to_tokens", body, nn.Conv2d(shape[1], 4 * shape[1], 2, stride=2))


@block(IMAGE, keeps=False, weight=0.5)
def _image_to_rows(draw: Draw, shape: Shape) -> Block:
    return Block("image_to_rows", lambda m, x: x.permute(0, 2, 3, 1).flatten(0, 2).unflatten(0, (-1, 4)).flatten(1))


@block(ROWS, keeps=False)
def _rows_to_tokens(draw: Draw, shape: Shape) -> Block:
    return Block("rows_to_tokens", lambda m, x: x.view(4, -1, x.shape[-1]))
