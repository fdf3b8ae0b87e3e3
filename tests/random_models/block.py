"""What random models are made of: blocks, the registry of their kinds, and the random choices of one model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = [
    "BLOCKS",
    "IMAGE",
    "ROWS",
    "TOKENS",
    "Block",
    "Body",
    "Draw",
    "Shape",
    "block",
    "channels",
    "mix",
    "one_of",
    "with_channels",
]

Shape = tuple[int, ...]
Body = Callable[[Any, Tensor], Tensor]
ROWS, TOKENS, IMAGE = 2, 3, 4
"""A kind is its number of dimensions."""
_DEEPEST_NEST = 2


class Block(nn.Module):
    """A forward given as a function of the module and its input, with the layers and buffers that it uses."""

    def __init__(self, recipe: str, body: Body, *parts: nn.Module, **tensors: Tensor) -> None:
        super().__init__()
        self.recipe = recipe
        self.body = body
        self.parts = nn.ModuleList(parts)
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)

    def extra_repr(self) -> str:
        return self.recipe


class Draw(random.Random):
    """Random choices of one model.

    Attributes:
        depth: how many nests are open.
        banned: names of blocks not to draw.
    """

    depth = 0
    banned: frozenset[str] = frozenset()

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def keeping(self, shape: Shape) -> Block:
        """A random block that keeps ``shape``."""
        return self.block(shape, keeps=True)

    def block(self, shape: Shape, *, keeps: bool = False) -> Block:
        """A random block for inputs of ``shape``."""
        found = [
            kind
            for name, kind in sorted(BLOCKS.items())
            if len(shape) in kind.takes
            and (kind.keeps or not keeps)
            and (self.depth < _DEEPEST_NEST or not kind.nests)
            and name not in self.banned
        ]
        kind = self.choices(found, [kind.weight for kind in found])[0]
        self.depth += kind.nests
        built = kind.build(self, shape)
        self.depth -= kind.nests
        return built


@dataclass(frozen=True)
class _Kind:
    build: Callable[[Draw, Shape], Block]
    takes: tuple[int, ...]
    weight: float
    keeps: bool
    nests: bool


BLOCKS: dict[str, _Kind] = {}
"""Every kind of block by its name, which its recipes begin with."""


def block(*takes: int, weight: float = 1.0, keeps: bool = True, nests: bool = False) -> Callable[..., Any]:
    def register(build: Callable[[Draw, Shape], Block]) -> Callable[[Draw, Shape], Block]:
        name = build.__name__.removeprefix("_")
        BLOCKS[name] = _Kind(build, takes or (ROWS, TOKENS, IMAGE), weight, keeps, nests)
        return build

    return register


def mix(shape: Shape, width: int | None = None) -> nn.Module:
    """A learned layer over the channels of ``shape``, ``width`` of them if given."""
    if len(shape) == IMAGE:
        return nn.Conv2d(shape[1], width or shape[1], 1)
    return nn.Linear(shape[-1], width or shape[-1])


def channels(shape: Shape) -> int:
    return shape[1] if len(shape) == IMAGE else shape[-1]


def with_channels(shape: Shape, width: int) -> Shape:
    return (shape[0], width, *shape[2:]) if len(shape) == IMAGE else (*shape[:-1], width)


def one_of(draw: Draw, name: str, variants: dict[str, Body], *parts: nn.Module, **tensors: Tensor) -> Block:
    chosen = draw.choice(sorted(variants))
    return Block(f"{name}:{chosen}", variants[chosen], *parts, **tensors)
