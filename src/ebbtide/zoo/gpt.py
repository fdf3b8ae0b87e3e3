"""A decoder-only transformer (Radford et al. 2019: pre-norm, learned positions, GELU, tied head), loss inside."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ebbtide.case import Case
from ebbtide.zoo.inputs import integers
from ebbtide.zoo.sizes import resized

__all__ = ["GPT", "GPT2_SMALL", "GPTConfig", "gpt", "gpt2_small"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of a :class:`GPT`."""

    vocabulary: int = 512
    """Number of tokens."""
    length: int = 256
    """Longest sequence, tokens."""
    layers: int = 12
    """Number of blocks."""
    width: int = 256
    """Size of the residual stream."""
    heads: int = 8
    """Attention heads per block; divides ``width``."""
    dropout: float = 0.0
    """Probability for embeddings, attention weights and residual branches."""
    tied: bool = True
    """Whether the head shares the embedding's weight."""


GPT2_SMALL = GPTConfig(vocabulary=50257, length=1024, layers=12, width=768, heads=12, dropout=0.1)
"""The smallest of Radford et al. 2019 (table 2; sizes of OpenAI's release)."""


class Block(nn.Module):
    """Attention and feed-forward, each behind a layer norm, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.dropout = config.heads, config.dropout
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape ``(batch, length, width)`` in and out."""
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)), rate)
        hidden = F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + F.dropout(self.down(hidden), rate)


class GPT(nn.Module):
    """Token and position embeddings, blocks, a norm and a head; the forward returns the loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialize)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of ``targets`` given ``tokens``, both int64 of shape ``(batch, length)``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        x = F.dropout(x, self.config.dropout if self.training else 0.0)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _initialize(module: nn.Module) -> None:
    """Normal weights of deviation 0.02 and zero biases (Radford et al. 2019)."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def gpt(
    batch: int = 4, config: GPTConfig | None = None, *, layers: int | None = None, length: int | None = None
) -> Case:
    """A training call of :class:`GPT` on ``batch`` random sequences of full length, or of sizes given."""
    config = resized(config or GPTConfig(), layers=layers, length=length)
    model = GPT(config)
    tokens = torch.randint(config.vocabulary, (batch, config.length + 1))
    name = f"gpt-{config.layers}L-d{config.width}-v{config.vocabulary}-b{batch}"
    return Case(model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), name=name)


def gpt2_small(
    batch: int = 4, config: GPTConfig = GPT2_SMALL, *, layers: int | None = None, length: int | None = None
) -> Case:
    """A training call of GPT-2's smallest size on ``batch`` random sequences of full length, or of sizes given."""
    config = resized(config, layers=layers, length=length)
    tokens, targets = (integers(config.vocabulary, batch, config.length, seed=seed) for seed in (1, 2))
    return Case(GPT(config), (tokens, targets), name=f"gpt2_small-{config.layers}L-d{config.width}-b{batch}")
