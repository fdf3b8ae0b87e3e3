"""Small models that situations share. Activations are most of what they take, unless their names say otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["Around", "Attention", "Chain", "ConvNet", "Mapped", "TokenModel", "Wrapped"]


class Chain(nn.Module):
    """``depth`` layers of ``width``, with GELU and dropout ``p``; returns the loss, or the features."""

    def __init__(self, width: int = 64, depth: int = 8, p: float = 0.0, *, loss: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.p, self.loss = p, loss

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), self.p, self.training)
        return x

    def forward(self, x: torch.Tensor) -> Any:
        x = self.features(x)
        return x.square().mean() if self.loss else x


class Around(nn.Module):
    """Another model behind a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.first = inner, nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x)) * 2


class Wrapped(nn.Module):
    """A chain in front of whatever ``make`` of the features and the model."""

    def __init__(self, make: Any, width: int = 64, depth: int = 6, **parameters: torch.Tensor) -> None:
        super().__init__()
        self.chain = Chain(width, depth, loss=False)
        self.make = make
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self, self.chain(x))


class Mapped(nn.Module):
    """Parameters and a function of the model and its arguments."""

    def __init__(self, make: Any, **parameters: torch.Tensor) -> None:
        super().__init__()
        self.make = make
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *args: Any) -> Any:
        return self.make(self, *args)


class Attention(nn.Module):
    """Two blocks of attention, by one kernel or by matrix products, with dropout ``p`` on its weights."""

    def __init__(self, width: int = 32, heads: int = 2, p: float = 0.0, *, sdpa: bool = True, blocks: int = 2) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(blocks))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.heads, self.p, self.sdpa = heads, p, sdpa

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        p = self.p if self.training else 0.0
        for qkv, out, norm in zip(self.qkv, self.out, self.norm, strict=True):
            q, k, v = qkv(norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            if self.sdpa:
                y = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
            else:
                y = F.dropout((q @ k.transpose(-1, -2) / 4).softmax(-1), p) @ v
            x = x + out(y.transpose(1, 2).reshape(rows, length, width))
        return x.float().square().mean()


class ConvNet(nn.Module):
    """Convolutions with batch norm; returns logits."""

    def __init__(self, channels: int = 8, depth: int = 3, p: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(depth))
        self.drop, self.head = nn.Dropout(p), nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.relu(norm(conv(x)))
        return self.head(self.drop(x.mean((2, 3))))


class TokenModel(nn.Module):
    """Embedding, attention, head; the loss when it is given labels, else logits."""

    def __init__(self, words: int = 50, width: int = 32, p: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.mix = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, words)
        self.p = p

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = F.dropout(self.embed(tokens), self.p, self.training)
        q, k, v = self.mix(x).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x + self.down(F.gelu(self.up(x))))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
