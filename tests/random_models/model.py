"""Whole models: a stem, random blocks and a head with the loss inside; how they are called and what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from random_models.block import IMAGE, ROWS, TOKENS, Block, Draw, Shape, channels

__all__ = ["RandomModel"]

_STARTS: dict[int, list[Shape]] = {
    ROWS: [(128, 64), (256, 32)],
    TOKENS: [(4, 32, 64), (8, 16, 64), (4, 64, 32)],
    IMAGE: [(4, 8, 16, 16), (2, 16, 16, 16), (8, 16, 8, 8)],
}
_VOCABULARY = 40
_MOST_BLOCKS = 8


def _stem(draw: Draw, shape: Shape) -> tuple[Block, Tensor]:
    """What makes a tensor of ``shape`` out of the model's input, and such an input."""
    width = channels(shape)
    if len(shape) == IMAGE:
        image = torch.randn(shape[0], 3, *shape[2:])
        return Block(
            "image", lambda m, x: m.parts[0](x), nn.Conv2d(3, width, 3, padding=1, bias=draw.chance(0.5))
        ), image
    if len(shape) == ROWS and draw.chance(0.6):
        return Block("rows", lambda m, x: m.parts[0](x), nn.Linear(20, width)), torch.randn(shape[0], 20)
    padding = draw.choice([None, 0, 3])
    if len(shape) == ROWS:
        bag = nn.EmbeddingBag(_VOCABULARY, width, mode=draw.choice(["mean", "sum"]), padding_idx=padding)
        return Block(f"bags:{bag.mode}", lambda m, x: m.parts[0](x), bag), torch.randint(_VOCABULARY, (shape[0], 5))
    table = nn.Embedding(_VOCABULARY, width, padding_idx=padding, scale_grad_by_freq=draw.chance(0.2))
    places = nn.Parameter(torch.randn(shape[1], width) / 2)

    def body(m: Any, x: Tensor) -> Tensor:
        return m.parts[0](x) + m.places

    return Block(f"tokens:padding {padding}", body, table, places=places), torch.randint(_VOCABULARY, shape[:2])


Loss = Callable[[Tensor, Tensor], Tensor]


def _loss(draw: Draw, shape: Shape) -> tuple[str, Loss, Tensor]:
    """A loss of logits of ``shape``, channels last, and its target."""
    classes = torch.randint(shape[-1], shape[:-1])
    values = torch.randn(shape)
    ignoring = torch.where(torch.rand(shape[:-1]) < 0.2, -100, classes)
    smooth = draw.choice([0.0, 0.1])
    found: dict[str, tuple[Loss, Tensor]] = {
        "cross entropy": (
            lambda y, t: F.cross_entropy(y.flatten(0, -2), t.flatten(), label_smoothing=smooth),
            ignoring,
        ),
        "cross entropy of planes": (lambda y, t: F.cross_entropy(y.movedim(-1, 1), t, reduction="sum") / 50, classes),
        "likelihood": (lambda y, t: F.nll_loss(y.log_softmax(-1).flatten(0, -2), t.flatten()), classes),
        "squares": (lambda y, t: F.mse_loss(y, t), values),
        "smooth": (lambda y, t: F.smooth_l1_loss(y, t) + F.l1_loss(y, t, reduction="sum") * 1e-3, values),
        "huber": (lambda y, t: F.huber_loss(y, t), values),
        "binary": (lambda y, t: F.binary_cross_entropy_with_logits(y, t), values.sigmoid()),
        "divergence": (lambda y, t: F.kl_div(y.log_softmax(-1), t, reduction="batchmean"), values.softmax(-1)),
        "mean": (lambda y, t: (y * t).square().mean(), values),
        "sum": (lambda y, t: (y * t).tanh().sum() * 0.01, values),
        "embedding": (lambda y, t: F.cosine_embedding_loss(y.flatten(0, -2), t.flatten(0, -2), t.new_ones(1)), values),
        "margin": (lambda y, t: F.multi_margin_loss(y.flatten(0, -2), t.flatten()), classes),
    }
    name = draw.choice(sorted(found))
    return name, *found[name]


class RandomModel(nn.Module):
    """A stem, blocks and a head with the loss inside; ``recipe`` says which."""

    def __init__(self, draw: Draw, kind: int) -> None:
        super().__init__()
        shape = draw.choice(_STARTS[kind])
        self.stem, self.example = _stem(draw, shape)
        self.blocks = nn.ModuleList()
        x = self.stem(self.example)
        for _ in range(draw.randint(4, _MOST_BLOCKS)):
            block = draw.block(tuple(x.shape))
            self.blocks.append(block)
            x = block(x).detach()
        hidden = (x.shape[0], *x.shape[2:], x.shape[1]) if x.dim() == IMAGE else tuple(x.shape)
        self.channels_first = x.dim() == IMAGE
        self.tied = isinstance(self.stem.parts[0], nn.Embedding) and self.stem.parts[0].embedding_dim == hidden[-1]
        self.tied = self.tied and draw.chance(0.5)
        self.head = nn.Linear(hidden[-1], _VOCABULARY, bias=not self.tied)
        if self.tied:
            self.head.weight = self.stem.parts[0].weight
        loss, self.loss, self.target = _loss(draw, (*hidden[:-1], _VOCABULARY))
        self.auxiliary = draw.choice([None, None, 0, 1])
        self.arguments = draw.choice(["tensors", "list", "dict", "keywords"])
        self.returned = draw.choice(["loss", "loss", "pair", "dict", "losses", "nested"])
        if draw.chance(0.3):
            self.unused = nn.Linear(4, 4)
        names = [
            self.stem.recipe,
            *(block.recipe for block in self.blocks),
            f"loss:{loss}{' tied' if self.tied else ''}",
        ]
        form = f"{self.arguments} -> {self.returned}" + (
            f", loss of block {self.auxiliary}" * (self.auxiliary is not None)
        )
        self.recipe = f"{' > '.join(names)} [{form}]"

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of one call."""
        x, target = self.example, self.target
        match self.arguments:
            case "list":
                return ([x, target],), {}
            case "dict":
                return ({"input": x, "labels": {"target": target}},), {}
            case "keywords":
                return (x,), {"target": target, "scale": 0.5}
            case _:
                return (x, target), {}

    def forward(self, batch: Any, target: Tensor | None = None, scale: float = 1.0) -> Any:
        if isinstance(batch, list):
            batch, target = batch
        elif isinstance(batch, dict):
            batch, target = batch["input"], batch["labels"]["target"]
        x = self.stem(batch)
        extra = []
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == self.auxiliary:
                extra.append(0.1 * x.square().mean())
        logits = self.head(x.movedim(1, -1) if self.channels_first else x)
        loss = self.loss(logits, target) * scale
        match self.returned:
            case "pair":
                return sum(extra, start=loss), logits
            case "dict":
                return {"loss": sum(extra, start=loss), "logits": logits, "hidden": x.detach()}
            case "losses":
                return [loss, *extra, logits.logsumexp(-1).square().mean()]
            case "nested":
                return sum(extra, start=loss), ({"logits": logits, "top": logits.argmax(-1)}, [x, scale])
            case _:
                return sum(extra, start=loss)
