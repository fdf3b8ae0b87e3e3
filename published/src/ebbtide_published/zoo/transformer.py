"""The transformer that translates (Vaswani et al. 2017): encoder and decoder, attention written out, loss inside.

Attention is a softmax of products and a dropout, as in the paper and in the frameworks of its time, whose large tensor
of weights per pair of tokens is stored; no fused kernel takes its place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.case import Case
from ebbtide.zoo.inputs import integers
from ebbtide.zoo.sizes import resized

__all__ = ["Transformer", "TransformerConfig", "transformer_base"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Sizes of a :class:`Transformer`; the defaults are the paper's base model (table 3)."""

    vocabulary: int = 37_000
    """Number of tokens, source and target together (section 5.1)."""
    layers: int = 6
    """Of the encoder, and of the decoder."""
    width: int = 512
    """Size of the residual stream."""
    hidden: int = 2048
    """Size inside of the feed-forward layers."""
    heads: int = 8
    """Attention heads; divides ``width``."""
    dropout: float = 0.1
    """Probability for embeddings, attention weights and residual branches."""
    smoothing: float = 0.1
    """Of the labels (section 5.4)."""


class Attention(nn.Module):
    """Heads of ``softmax(Q K' / sqrt(d)) V`` (section 3.2)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query, self.key, self.value, self.out = (nn.Linear(config.width, config.width) for _ in range(4))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Args: queries' ``x`` and ``memory``, batch x length x width; ``mask`` is true where nothing is to be read."""
        query, key, value = (self._split(layer(of)) for layer, of in self._projections(x, memory))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(mask, -math.inf)
        mixed = self.dropout(scores.softmax(-1)) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _projections(self, x: torch.Tensor, memory: torch.Tensor) -> list[tuple[nn.Linear, torch.Tensor]]:
        return [(self.query, x), (self.key, memory), (self.value, memory)]

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Layer(nn.Module):
    """Attention to itself, in a decoder to the encoder too, and a feed-forward layer, a norm behind each."""

    def __init__(self, config: TransformerConfig, *, decodes: bool) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.reading = Attention(config) if decodes else None
        self.up, self.down = nn.Linear(config.width, config.hidden), nn.Linear(config.hidden, config.width)
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(3 if decodes else 2))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Shape ``(batch, length, width)`` in and out."""
        norms = iter(self.norms)
        x = next(norms)(x + self.dropout(self.attention(x, x, mask)))
        if self.reading is not None and memory is not None:
            x = next(norms)(x + self.dropout(self.reading(x, memory)))
        return next(norms)(x + self.dropout(self.down(F.relu(self.up(x)))))


class Transformer(nn.Module):
    """One embedding for source, target and head (section 3.4), six layers each; the forward returns the loss."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        nn.init.normal_(self.tokens.weight, std=config.width**-0.5)
        self.encoder = nn.ModuleList(Layer(config, decodes=False) for _ in range(config.layers))
        self.decoder = nn.ModuleList(Layer(config, decodes=True) for _ in range(config.layers))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy with smoothed labels.

        Args:
            source: int64 tokens, shape ``(batch, length)``.
            target: int64 tokens, shape ``(batch, length + 1)``; the first only starts the decoder.
        """
        memory = self._embedded(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self._embedded(target[:, :-1])
        length = x.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        for layer in self.decoder:
            x = layer(x, memory, future)
        scores = F.linear(x, self.tokens.weight).flatten(0, 1)
        return F.cross_entropy(scores, target[:, 1:].flatten(), label_smoothing=self.config.smoothing)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings, and sines of places (section 3.5)."""
        width = self.config.width
        powers = torch.arange(0, width, 2, device=tokens.device, dtype=torch.float32) / width
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), 10_000.0**-powers)
        places = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        return self.dropout(self.tokens(tokens) * math.sqrt(width) + places)


def transformer_base(
    batch: int = 16, *, length: int = 64, layers: int | None = None, config: TransformerConfig | None = None
) -> Case:
    """A training call of the base :class:`Transformer` on ``batch`` random pairs of sentences of ``length`` tokens."""
    config = resized(config or TransformerConfig(), layers=layers)
    arguments = tuple(integers(config.vocabulary, batch, length + n, seed=1 + n) for n in range(2))
    return Case(Transformer(config), arguments, name=f"transformer_base-{config.layers}L-t{length}-b{batch}")
