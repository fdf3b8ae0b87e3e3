"""Blocks over time: attention in its forms, cells and recurrent modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from random_models.block import TOKENS, Block, Body, Draw, Shape, block, mix, one_of


@block(TOKENS, weight=4)
def _attention(draw: Draw, shape: Shape) -> Block:
    batch, length, width = shape
    heads, rate, causal = draw.choice([2, 4]), draw.choice([0.0, 0.1]), draw.chance(0.5)
    masked = not causal and draw.chance(0.5)

    def body(m: Any, x: Tensor) -> Tensor:
        qkv = m.parts[1](m.parts[0](x)).view(batch, length, 3, heads, width // heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mask = m.mask if masked else None
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate, is_causal=causal)
        return x + m.parts[2](mixed.transpose(1, 2).reshape(x.shape))

    mask = torch.ones(length, length, dtype=torch.bool).tril(3)
    parts = (nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=draw.chance(0.5)), nn.Linear(width, width))
    flags = f"{rate} {'causal' if causal else 'masked' if masked else 'full'}"
    return Block(f"attention:{flags}", body, *parts, mask=mask)


@block(TOKENS, weight=2)
def _written_attention(draw: Draw, shape: Shape) -> Block:
    length, width = shape[1:]

    def einsum(m: Any, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (4, width // 4)) for part in m.parts[:3])
        scores = torch.einsum("bqhc,bkhc->bhqk", q, k) / width**0.5
        weights = F.dropout(scores.masked_fill(m.mask, float("-inf")).softmax(-1), 0.1)
        return torch.einsum("bhqk,bkhc->bqhc", weights, v).flatten(-2)

    def products(m: Any, x: Tensor) -> Tensor:
        q, k, v = (part(x) for part in m.parts[:3])
        weights = torch.baddbmm(m.bias, q, k.mT, alpha=width**-0.5).softmax(-1)
        return torch.bmm(weights, v) + torch.matmul(weights.mean(0), v)

    variants: dict[str, Body] = {"einsum": einsum, "products": products}
    mask, bias = torch.ones(length, length, dtype=torch.bool).triu(1), nn.Parameter(torch.zeros(1, length, length))
    return one_of(draw, "written_attention", variants, *(mix(shape) for _ in range(3)), mask=mask, bias=bias)


@block(TOKENS)
def _torch_attention(draw: Draw, shape: Shape) -> Block:
    length, width = shape[1:]
    rate, weights = draw.choice([0.0, 0.1]), draw.chance(0.3)
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    variants: dict[str, Body] = {
        f"multihead {rate} weights {weights}": lambda m, x: m.parts[0](x, x, x, need_weights=weights)[0],
        "multihead causal": lambda m, x: m.parts[0](x, x, x, attn_mask=m.mask, is_causal=True, need_weights=False)[0],
        "encoder layer": lambda m, x: m.parts[1](x),
        "decoder layer": lambda m, x: m.parts[2](x, m.memory.expand(x.shape[0], -1, -1)),
    }
    parts = (
        nn.MultiheadAttention(width, 4, dropout=rate, batch_first=True),
        nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, "gelu", batch_first=True, norm_first=draw.chance(0.5)),
        nn.TransformerDecoderLayer(width, 4, 2 * width, 0.0, batch_first=True),
    )
    memory = nn.Parameter(torch.randn(1, 7, width))
    return one_of(draw, "torch_attention", variants, *parts, mask=mask, memory=memory)


@block(TOKENS)
def _cells(draw: Draw, shape: Shape) -> Block:
    width, steps = shape[2], draw.choice([3, 5])

    def lstm(m: Any, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(x.shape[0], width)
        outputs = []
        for step in x[:, :steps].unbind(1):
            hidden, cell = m.parts[0](step, (hidden, cell))
            outputs.append(hidden)
        return torch.cat((torch.stack(outputs, 1), x[:, steps:] + hidden.unsqueeze(1)), 1)

    def gru(m: Any, x: Tensor) -> Tensor:
        hidden = x.mean(1)
        for step in range(steps):
            hidden = m.parts[1](x[:, step], hidden)
        return x + hidden[:, None]

    variants: dict[str, Body] = {f"lstm {steps}": lstm, f"gru {steps}": gru}
    return one_of(draw, "cells", variants, nn.LSTMCell(width, width), nn.GRUCell(width, width))


@block(TOKENS)
def _recurrent(draw: Draw, shape: Shape) -> Block:
    width, stride = shape[2], shape[1] // 4
    both = draw.chance(0.3)
    options = {"num_layers": draw.choice([1, 2]), "dropout": 0.1, "batch_first": True, "bidirectional": both}
    options |= {"dropout": 0.0} if options["num_layers"] == 1 else {}
    hidden = width // 2 if both else width
    kind = draw.choice([nn.LSTM, nn.GRU, nn.RNN])

    def body(m: Any, x: Tensor) -> Tensor:
        outputs, _ = m.parts[0](x[:, ::stride])
        return x + outputs.repeat_interleave(stride, 1)

    layers, way = options["num_layers"], "both ways" if both else "one way"
    return Block(f"recurrent:{kind.__name__} {layers} {way}", body, kind(width, hidden, **options))
