"""Blocks of learned layers: linear, convolution, normalisation, pooling, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from random_models.block import (
    IMAGE,
    ROWS,
    TOKENS,
    Block,
    Body,
    Draw,
    Shape,
    block,
    channels,
    mix,
    one_of,
    with_channels,
)


@block(weight=3)
def _layer(draw: Draw, shape: Shape) -> Block:
    wide = channels(shape) * draw.choice([1, 2, 4])

    def body(m: Any, x: Tensor) -> Tensor:
        return m.parts[1](F.gelu(m.parts[0](x)))

    return Block(
        f"layer:{wide}",
        body,
        mix(shape, wide),
        mix(with_channels(shape, wide), channels(shape)),
    )


@block(weight=3)
def _activation(draw: Draw, shape: Shape) -> Block:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "leaky": lambda x: F.leaky_relu(x, 0.1),
        "softplus": F.softplus,
        "elu": F.elu,
        "selu": F.selu,
        "mish": F.mish,
        "hardswish": F.hardswish,
        "glu": lambda x: F.glu(torch.cat((x, x.flip(-1)), -1)),
        "softmax": lambda x: x.softmax(-1) * x.shape[-1],
        "log_softmax": lambda x: x.log_softmax(1),
    }
    return one_of(draw, "activation", {k: lambda m, x, f=f: f(m.parts[0](x)) for k, f in functions.items()}, mix(shape))


@block(weight=2)
def _in_place_activation(draw: Draw, shape: Shape) -> Block:
    modules = [nn.ReLU(True), nn.SiLU(True), nn.Hardswish(True), nn.LeakyReLU(0.1, True), nn.ELU(inplace=True)]
    modules += [nn.Dropout(0.1, inplace=True), nn.Mish(inplace=True), nn.Hardtanh(inplace=True)]
    chosen = draw.choice(modules)
    return Block(
        f"in_place_activation:{type(chosen).__name__}", lambda m, x: m.parts[1](m.parts[0](x)), mix(shape), chosen
    )


@block(weight=3)
def _norm(draw: Draw, shape: Shape) -> Block:
    width = channels(shape)
    options: dict[str, nn.Module] = {"group": nn.GroupNorm(4, width)}
    if len(shape) != IMAGE:
        options["layer"] = nn.LayerNorm(width, elementwise_affine=draw.chance(0.7), bias=draw.chance(0.5))
        options["rms"] = nn.RMSNorm(width)
    norm = nn.BatchNorm2d if len(shape) == IMAGE else nn.BatchNorm1d
    options["batch"] = norm(width)
    options["batch untracked"] = norm(width, track_running_stats=False)
    options["batch momentum"] = norm(width, momentum=0.5, affine=False)
    options["batch frozen"] = norm(width).eval()
    if len(shape) != ROWS:
        instance = nn.InstanceNorm2d if len(shape) == IMAGE else nn.InstanceNorm1d
        options["instance"] = instance(width, affine=True)
        options["instance tracked"] = instance(width, affine=True, track_running_stats=True)
    name = draw.choice(sorted(options))
    last = len(shape) == TOKENS and name not in ("layer", "rms")
    body: Body = (lambda m, x: m.parts[0](x.transpose(1, 2)).transpose(1, 2)) if last else (lambda m, x: m.parts[0](x))
    return Block(f"norm:{name}", body, options[name])


@block(weight=2)
def _dropout(draw: Draw, shape: Shape) -> Block:
    variants: dict[str, Body] = {
        "functional": lambda m, x: F.dropout(x, 0.2),
        "module": lambda m, x: m.parts[0](x),
        "alpha": lambda m, x: F.alpha_dropout(x, 0.1, training=True),
        "feature alpha": lambda m, x: F.feature_alpha_dropout(x, 0.1, training=True),
        "none": lambda m, x: F.dropout(x, 0.0),
        "all": lambda m, x: x + F.dropout(x, 1.0),
    }
    if len(shape) == TOKENS:
        variants["features"] = lambda m, x: F.dropout1d(x, 0.2)
    if len(shape) == IMAGE:
        variants["features"] = lambda m, x: F.dropout2d(x, 0.2)
    return one_of(draw, "dropout", variants, nn.Dropout(0.3))


@block(IMAGE, weight=5)
def _conv(draw: Draw, shape: Shape) -> Block:
    width = shape[1]
    groups, dilation, kernel = draw.choice([1, 1, 2, width]), draw.choice([1, 1, 2]), draw.choice([1, 3, 3, 5])
    mode = draw.choice(["zeros", "zeros", "zeros", "reflect", "circular", "replicate"])
    padding = dilation * (kernel // 2)
    layer = nn.Conv2d(
        width,
        width,
        kernel,
        padding=padding,
        groups=groups,
        dilation=dilation,
        bias=draw.chance(0.7),
        padding_mode=mode,
    )
    return Block(f"conv:{kernel} g{groups} d{dilation} {mode}", lambda m, x: m.parts[0](x), layer)


@block(IMAGE, weight=2)
def _separable(draw: Draw, shape: Shape) -> Block:
    width = shape[1]
    parts = (nn.Conv2d(width, 2 * width, 1), nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width))
    norm, act = nn.BatchNorm2d(2 * width), nn.ReLU6(inplace=True)
    return Block(
        "separable", lambda m, x: x + m.parts[0](x), nn.Sequential(*parts, norm, act, nn.Conv2d(2 * width, width, 1))
    )


@block(IMAGE, weight=3)
def _down_and_up(draw: Draw, shape: Shape) -> Block:
    width = shape[1]
    down: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "max": lambda m, x: F.max_pool2d(x, 2),
        "max overlapping": lambda m, x: F.max_pool2d(x, 3, stride=2, padding=1),
        "average": lambda m, x: F.avg_pool2d(x, 2),
        "adaptive": lambda m, x: F.adaptive_avg_pool2d(x, (x.shape[2] // 2, x.shape[3] // 2)),
        "adaptive max": lambda m, x: F.adaptive_max_pool2d(x, (x.shape[2] // 2, x.shape[3] // 2)),
        "strided": lambda m, x: m.parts[0](x),
        "shuffle": lambda m, x: m.parts[1](F.pixel_unshuffle(x, 2)),
    }
    up: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "nearest": lambda m, x: F.interpolate(x, scale_factor=2, mode="nearest"),
        "transposed": lambda m, x: m.parts[2](x),
        "shuffle": lambda m, x: F.pixel_shuffle(m.parts[3](x), 2),
        "repeat": lambda m, x: x.repeat_interleave(2, 2).repeat_interleave(2, 3),
    }
    if draw.chance(0.1):
        up = {"bilinear": lambda m, x: F.interpolate(x, scale_factor=2, mode="bilinear")}
    first, second = draw.choice(sorted(down)), draw.choice(sorted(up))
    parts = (
        nn.Conv2d(width, width, 3, stride=2, padding=1),
        nn.Conv2d(4 * width, width, 1),
        nn.ConvTranspose2d(width, width, 3, stride=2, padding=1, output_padding=1, groups=draw.choice([1, 2])),
        nn.Conv2d(width, 4 * width, 1),
    )
    return Block(f"down_and_up:{first}/{second}", lambda m, x: x + up[second](m, down[first](m, x).tanh()), *parts)


@block(IMAGE)
def _unpooled(draw: Draw, shape: Shape) -> Block:
    def body(m: Any, x: Tensor) -> Tensor:
        pooled, places = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(m.parts[0](pooled), places, 2)

    return Block("unpooled", body, mix(shape))


@block(IMAGE)
def _gate(draw: Draw, shape: Shape) -> Block:
    parts = (nn.AdaptiveAvgPool2d(1), nn.Conv2d(shape[1], 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, shape[1], 1))
    return Block("gate", lambda m, x: x * m.parts[0](x), nn.Sequential(*parts, nn.Hardsigmoid()))


@block(TOKENS, weight=2)
def _conv1d(draw: Draw, shape: Shape) -> Block:
    groups, dilation = draw.choice([1, 4, shape[2]]), draw.choice([1, 2])
    causal = draw.chance(0.5)

    def body(m: Any, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        y = F.pad(y, (2 * dilation, 0) if causal else (dilation, dilation))
        return m.parts[0](y).transpose(1, 2)

    return Block(
        f"conv1d:g{groups} d{dilation}", body, nn.Conv1d(shape[2], shape[2], 3, groups=groups, dilation=dilation)
    )
